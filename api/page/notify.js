// A notification of the browser when a batch ends, for those batches for which the user asked in this tab. The views stop
// following while the tab is hidden, so this has an event stream of its own.

import * as api from "./api.js";
import { count, isLive, number, title } from "./format.js";
import { stateName } from "./pieces.js";

const PLACE = "lastbit.notify";
const AGAIN = 15_000; // milliseconds until the next try, if the service refuses the stream
const ENDS = ["completed", "expired", "cancelled"].map((name) => `type=batch.${name}`).join("&");

const asked = new Set(); // ids
let source = null;
let timer = 0;

// Browsers notify only over HTTPS, and on the machine itself.
export const canNotify = () => isSecureContext && "Notification" in window;
export const isAsked = (id) => asked.has(id);

// Return whether the user allows it. The browser asks only the first time.
export async function notifyAtEnd(id) {
  if ((await Notification.requestPermission()) !== "granted") return false;
  asked.add(id);
  keep();
  return true;
}

export function dontNotify(id) {
  asked.delete(id);
  keep();
}

// After a reload, wait for the same batches.
export function resumeNotifying() {
  let kept = [];
  try {
    kept = JSON.parse(sessionStorage.getItem(PLACE) ?? "[]");
  } catch {
    // This browser keeps nothing for the page.
  }
  if (!kept.length || !canNotify() || Notification.permission !== "granted") return;
  for (const id of kept) asked.add(id);
  listen();
}

function keep() {
  try {
    sessionStorage.setItem(PLACE, JSON.stringify([...asked]));
  } catch {
    // As above.
  }
  if (asked.size) listen();
  else close();
}

function listen() {
  if (source !== null) return;
  source = new EventSource(`/v1/events/stream?${ENDS}`);
  // A batch may have ended before, or while the stream was interrupted.
  source.onopen = () => [...asked].forEach(check);
  source.onmessage = (message) => {
    const { batch } = JSON.parse(message.data);
    if (asked.has(batch)) check(batch);
  };
  source.onerror = () => {
    if (source?.readyState !== EventSource.CLOSED) return;
    close();
    timer = setTimeout(listen, AGAIN);
  };
}

function close() {
  clearTimeout(timer);
  source?.close();
  source = null;
}

async function check(id) {
  let batch;
  try {
    batch = await api.batch(id);
  } catch (error) {
    if (error.code === "batch_not_found") dontNotify(id);
    return;
  }
  if (isLive(batch) || !asked.has(id)) return;
  dontNotify(id);
  const text = `${count(batch.items, "item")}, ${number(batch.failed)} failed`;
  try {
    const shown = new Notification(`${title(batch)}: ${stateName(batch)}`, { body: text, tag: `lastbit-${id}` });
    shown.onclick = () => {
      focus();
      location.hash = `#/batches/${id}`;
    };
  } catch {
    // Chrome on Android shows none of a page that has no service worker.
  }
}

addEventListener("signedout", () => {
  asked.clear();
  keep();
});
