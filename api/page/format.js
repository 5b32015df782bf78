// Numbers, times and items in readable form.

import { make, setText } from "./dom.js";
import { preferred } from "./preferences.js";

const NUMBER = new Intl.NumberFormat("en");

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

const pad = (part, digits = 2) => String(part).padStart(digits, "0");
const isUtc = () => preferred("zone") === "UTC";

// The parts of a time in the user's zone.
function parts(at) {
  const get = (part) => at[`get${isUtc() ? "UTC" : ""}${part}`]();
  const day = [pad(get("FullYear"), 4), pad(get("Month") + 1), pad(get("Date"))].join("-");
  return { day, minute: `${pad(get("Hours"))}:${pad(get("Minutes"))}`, second: pad(get("Seconds")) };
}

function offset(at) {
  const minutes = -at.getTimezoneOffset();
  const size = Math.abs(minutes);
  return `${minutes < 0 ? "−" : "+"}${pad(Math.floor(size / 60))}:${pad(size % 60)}`;
}

// The one form of a time: 2026-05-04 17:30:00, or with UTC behind it.
function dateTime(at) {
  const { day, minute, second } = parts(at);
  return `${day} ${minute}:${second}${isUtc() ? " UTC" : ""}`;
}

// A time is an age or a remaining time, with the date as its title; or the other way round, as the user prefers.
function showTime(node) {
  const at = new Date(node.dateTime);
  const isDated = node.dataset.dated !== undefined || preferred("times") === "dates";
  setText(node, isDated ? dateTime(at) : relative(node));
  const words = isDated ? relative(node) : `${dateTime(at)}${isUtc() ? "" : ` ${offset(at)}`}`;
  if (node.title !== words) node.title = words;
}

function time(moment, data) {
  const node = make("time", { datetime: moment, ...data });
  showTime(node);
  return node;
}

// A time in the past or in the future. `keepTimes` updates both.
export const since = (moment) => time(moment, {});
export const until = (moment) => time(moment, { "data-ahead": true });

// The parts of a text of the service, with its times in the user's zone.
export const withTimes = (text) =>
  text.split(/(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC)/).map((part, place) => (place % 2 ? time(part.replace(" UTC", "Z").replace(" ", "T"), { "data-dated": true }) : part));

// The value of a field of time, which is in the user's zone, and back.
export function localTime(moment) {
  const at = new Date(moment);
  if (Number.isNaN(at.getTime())) return "";
  const { day, minute } = parts(at);
  return `${day}T${minute}`;
}
export const utcTime = (local) => (local ? new Date(`${local}${isUtc() ? "Z" : ""}`).toISOString().replace(".000Z", "Z") : "");

export function keepTimes() {
  const showAll = () => document.querySelectorAll("time").forEach(showTime);
  addEventListener("preference", showAll);
  setInterval(() => document.hidden || showAll(), 5000);
}

export const rate = (perSecond) =>
  perSecond >= 10 ? `${number(Math.round(perSecond))}/s` : `${perSecond.toFixed(1)}/s`;

export const itemId = (batch, at, groupSize) => `${batch}:${Math.floor(at / groupSize)}:${at % groupSize}`;

export const title = (batch) => (batch.key === null || batch.key === "" ? `Batch ${batch.id}` : batch.key);

export const isLive = (batch) => batch.state === "open" || batch.state === "sealed";

// An open batch may still grow, so its progress is only "so far".
export const soFar = (batch) => (batch.state === "open" ? " so far" : "");
