// Items as CSV and JSON, reasons as a text for a message, and files that the browser saves.

import { count, number, title } from "./format.js";

// For a message or an incident's log.
export function asText(batch, { reasons, failed, examined, exact }) {
  const head = `${title(batch)} (batch ${batch.id}): ${number(failed)} of ${count(batch.items, "item")} failed`;
  const lines = reasons.map(({ reason, count: many, items }) => `${number(many)}  ${reason ?? "no reason given"}  (${items.join(" ")}${many > items.length ? " …" : ""})`);
  return [head, exact ? null : `A sample of ${number(examined)} failed items:`, ...lines, ""].filter((line) => line !== null).join("\n");
}

// `items` are all items of the `kind`, unless `isWhole` is false: then the file says how many there are.
export const asJson = (batch, { kind, items, all, isWhole }) =>
  `${JSON.stringify({ batch: batch.id, key: batch.key, state: kind, count: isWhole ? items.length : all, whole: isWhole, items }, null, 1)}\n`;

// Spreadsheets run a cell that begins with one of these as a formula, and reasons are the clients' own text.
const cell = (value) => {
  const text = value === null ? "" : String(value);
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

export function asCsv(_, { kind, items, all, isWhole }) {
  const columns = kind === "pending" ? ["item"] : ["item", "reason"];
  const rows = items.map((item) => columns.map((column) => item[column]));
  const mark = isWhole ? [] : [[`cut: the first ${number(items.length)} of ${number(all)} ${kind} items`]];
  return [columns, ...rows, ...mark].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

export function save(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  // The browser reads it after the click.
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
