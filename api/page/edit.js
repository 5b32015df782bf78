// The dialog that changes the tolerance, the deadline and the labels of a live batch. Only what was changed is sent, so
// that a field that somebody else changes meanwhile keeps its new value.

import * as api from "./api.js";
import { askFor } from "./dialogs.js";
import { make, say } from "./dom.js";
import { localTime, title, utcTime } from "./format.js";
import { field } from "./views.js";

const EXCEEDED = [["continue", "the batch continues"], ["cancel", "the batch is cancelled"]];

// What is no number is sent as it is, for the service to refuse.
const limit = (text) => (text === "" ? null : /^\d+$/.test(text) ? Number(text) : text);
const READ = { tolerated_failures: limit, tolerated_failure_percentage: limit, on_exceeded: (word) => word, deadline: (local) => utcTime(local) || null };

// `done` is called after a change.
export function askToEdit(batch, done) {
  const key = api.newKey(); // so that a retry after a lost answer doesn't undo a later update
  const before = {
    tolerated_failures: String(batch.tolerated_failures ?? ""),
    tolerated_failure_percentage: String(batch.tolerated_failure_percentage ?? ""),
    on_exceeded: batch.on_exceeded,
    deadline: localTime(batch.deadline ?? ""),
  };
  const labels = labelsEditor(batch.labels);
  const number = { inputmode: "numeric", placeholder: "no limit" };
  const exceeded = make(
    "select",
    { id: "on_exceeded", name: "on_exceeded" },
    EXCEEDED.map(([value, word]) => make("option", { value, selected: value === before.on_exceeded }, word)),
  );
  const body = make(
    "div.edit",
    {},
    make(
      "div.pair",
      {},
      make("div", {}, field("tolerated_failures", "Tolerated failures", { ...number, value: before.tolerated_failures }, "items")),
      make("div", {}, field("tolerated_failure_percentage", "Tolerated percentage", { ...number, value: before.tolerated_failure_percentage }, "% of the items, once it is sealed")),
    ),
    make("label.field-line", { for: "on_exceeded" }, make("span", {}, "If more fail"), exceeded, make("small.quiet", {}, "It happens at once if more have failed already.")),
    field("deadline", "Deadline", { type: "datetime-local", max: "9999-12-31T23:59", value: before.deadline }, "in your time zone"),
    labels.node,
  );
  askFor({
    heading: `Edit ${title(batch)}`,
    body,
    confirm: "Save",
    keep: "Don’t save",
    fieldOf: labels.fieldOf,
    async act(values) {
      const patch = changes(values);
      if (!Object.keys(patch).length) return;
      try {
        await api.update(batch.id, patch, key);
      } catch (error) {
        // The change may have been made; a retry must ask for the same.
        if (error.status === 0 || error.status >= 500) body.inert = true;
        throw error;
      }
      say(`Batch ${batch.id} is updated`);
      done();
    },
  });

  function changes(values) {
    const changed = Object.entries(READ)
      .filter(([name]) => values[name].trim() !== before[name])
      .map(([name, read]) => [name, read(values[name].trim())]);
    const merged = labels.changes();
    if (merged.length) changed.push(["labels", Object.fromEntries(merged)]);
    return Object.fromEntries(changed);
  }
}

// A line for each label, which can be changed and removed, and lines for new ones.
function labelsEditor(labels) {
  const lines = new Set();
  const list = make("ul");
  const add = make("button", { type: "button", onclick: () => addLine().name.focus() }, "Add a label");
  const node = make("fieldset", {}, make("legend", {}, "Labels"), list, add);
  let last = 0;

  for (const [name, value] of Object.entries(labels)) addLine(name, value);

  function input(word, properties) {
    return make("input", { id: `label-${++last}`, "aria-label": word, autocomplete: "off", autocapitalize: "off", spellcheck: "false", ...properties });
  }

  // `name`: of a label that the batch has.
  function addLine(name = null, value = null) {
    const line = { isNew: name === null, value: input(`Value of ${name ?? "the new label"}`, { value, maxlength: 1024, placeholder: "value" }) };
    line.name = line.isNew ? input("Name of the new label", { maxlength: 255, placeholder: "name", pattern: "[^:]*", title: "without a colon" }) : null;
    line.read = () => name ?? line.name.value.trim();
    line.before = line.value.value; // as the field shows it, without line breaks
    const remove = make("button", { type: "button", "aria-label": `Remove ${name ?? "the new label"}`, onclick: removed }, "×");
    const item = make("li", {}, line.name ?? make("span.breakable", {}, name), line.value, remove);
    lines.add(line);
    list.append(item);
    return line;

    function removed() {
      lines.delete(line);
      item.remove();
      add.focus();
    }
  }

  return {
    node,
    // The name and the new value of each label that was changed, null if it was removed.
    changes() {
      const left = new Set([...lines].map((line) => line.read()));
      const gone = Object.keys(labels).filter((name) => !left.has(name));
      const changed = [...lines].filter((line) => (line.isNew ? line.read() || line.value.value : line.value.value !== line.before));
      return [...gone.map((name) => [name, null]), ...changed.map((line) => [line.read(), line.value.value])];
    },
    fieldOf(place) {
      const line = [...lines].reverse().find((each) => place === `labels.${each.read()}`);
      return line && (line.name ?? line.value);
    },
  };
}
