// Numbers, times and items in readable form.

import { make } from "./dom.js";

const NUMBER = new Intl.NumberFormat("en");
const MOMENT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export const number = (value) => NUMBER.format(value);

export const count = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;

// A duration in its two largest units: 12 s, 3 min 20 s, 5 h 2 min, 3 d 4 h.
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  for (const [unit, name, smaller, smallerName, limit] of [
    [60, "min", 1, "s", 3600],
    [3600, "h", 60, "min", 86400],
    [86400, "d", 3600, "h", Infinity],
  ]) {
    if (whole < limit) {
      const rest = Math.floor((whole % unit) / smaller);
      return `${Math.floor(whole / unit)} ${name}${rest ? ` ${rest} ${smallerName}` : ""}`;
    }
  }
}

// An age in its largest unit.
export function age(seconds) {
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${number(Math.floor(seconds / 86400))} d ago`;
}

const wait = (seconds) => (seconds < 1 ? "now" : `in ${duration(seconds)}`);

const relative = (node) => {
  const ago = (Date.now() - Date.parse(node.dateTime)) / 1000;
  return node.dataset.ahead === undefined ? age(ago) : wait(-ago);
};

function time(moment, data) {
  const node = make("time", { datetime: moment, title: MOMENT.format(new Date(moment)), ...data });
  node.textContent = relative(node);
  return node;
}

// An age or a remaining time that is updated (see keepAges); its title is the exact time.
export const since = (moment) => time(moment, {});
export const until = (moment) => time(moment, { "data-ahead": true });

const pad = (part) => String(part).padStart(2, "0");

// The value of a field of local time, and back.
export function localTime(moment) {
  const at = new Date(moment);
  if (Number.isNaN(at.getTime())) return "";
  const day = `${String(at.getFullYear()).padStart(4, "0")}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  return `${day}T${pad(at.getHours())}:${pad(at.getMinutes())}`;
}
export const utcTime = (local) => (local ? new Date(local).toISOString().replace(".000Z", "Z") : "");

export function keepAges() {
  setInterval(() => {
    if (document.hidden) return;
    for (const node of document.querySelectorAll("time")) {
      const text = relative(node);
      if (node.textContent !== text) node.textContent = text;
    }
  }, 5000);
}

// A percentage such as 99.95 %. It is 100 only when all is done and 0 only when nothing is.
export function percent(part, whole) {
  if (part >= whole) return "100";
  const share = (100 * part) / whole;
  if (part > 0 && share < 0.01) return "<0.01";
  const digits = share >= 99 || share < 1 ? 2 : share >= 90 || share < 10 ? 1 : 0;
  const scale = 10 ** digits;
  return String(Math.floor(share * scale) / scale);
}

export const rate = (perSecond) =>
  perSecond >= 10 ? `${number(Math.round(perSecond))}/s` : `${perSecond.toFixed(1)}/s`;

export const itemId = (batch, at, groupSize) => `${batch}:${Math.floor(at / groupSize)}:${at % groupSize}`;

export const title = (batch) => (batch.key === null || batch.key === "" ? `Batch ${batch.id}` : batch.key);

export const isLive = (batch) => batch.state === "open" || batch.state === "sealed";

// An open batch may still grow, so its progress is only "so far".
export const soFar = (batch) => (batch.state === "open" ? " so far" : "");
