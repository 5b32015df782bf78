// The filter of the list and its form. The filter is part of the address, so that it can be shared and survives a reload.

import { fill, make } from "./dom.js";
import { localTime, number, utcTime } from "./format.js";
import { STATES } from "./pieces.js";
import { address, choices } from "./views.js";

const PAUSE = 250; // after the last key, before the list is searched
const OUTCOMES = ["succeeded", "failed", "exceeded"];
const NAMES = ["state", "outcome", "key", "key_prefix", "label", "opened_after", "opened_before", "parent"];

export const readFilter = (parameters) =>
  Object.fromEntries([...NAMES, "by"].map((name) => [name, name === "label" ? parameters.getAll(name) : (parameters.get(name) ?? "")]));

// The filter as the service takes it: the order of the list, `by`, is only part of the address.
export const queryOf = ({ by, ...query }) => query;

export const filterAddress = (filter) => address("/", filter);

// Whether the filter has more than a state.
export const isNarrow = (filter) => NAMES.some((name) => name !== "state" && filter[name].length > 0);

// A complete batch succeeded or not; another one has no such outcome.
const hasOutcome = (state, outcome) => outcome === "exceeded" || state === "" || state === "complete";

// The form. It follows what is typed: `location` changes a moment after the last key, without an entry in the history.
// Enter in the key's field calls `entered`.
export function filterForm(entered) {
  let filter = readFilter(new URLSearchParams());
  let timer = 0;
  let before = [null, {}]; // the counts, and the filter that they are of
  const states = choices("State");
  const chips = make("ul.chips", { "aria-label": "Also filtered by" });
  const key = make("input", { id: "key", type: "search", placeholder: "begins with", autocomplete: "off", autocapitalize: "off", spellcheck: "false", maxlength: 255 });
  const label = make("input", { id: "label", placeholder: "name:value", autocomplete: "off", autocapitalize: "off", spellcheck: "false" });
  const outcome = make(
    "select",
    { id: "outcome", onchange: typed },
    ["", ...OUTCOMES].map((value) => make("option", { value }, value || "any")),
  );
  const after = make("input", { id: "opened-after", type: "datetime-local", max: "9999-12-31T23:59" });
  const until = make("input", { id: "opened-before", type: "datetime-local", max: "9999-12-31T23:59" });
  for (const input of [key, after, until]) input.addEventListener("input", typed);
  const named = (word, input) => make("label", { for: input.id }, make("span", {}, word), input);
  const node = make(
    "form.filter",
    { role: "search", "aria-label": "Filter", onsubmit: submitted },
    states.node,
    make("div.fields", {}, named("Key", key), named("Label", label), named("Outcome", outcome), named("Opened from", after), named("to", until), make("button", { type: "submit" }, "Filter")),
    chips,
  );

  // The filter that the form's fields describe. A time of the address may be finer than its field.
  function current() {
    const time = (input, given) => (input.value === localTime(given) ? given : utcTime(input.value));
    const now = {
      ...filter,
      key_prefix: key.value,
      outcome: outcome.value,
      opened_after: time(after, filter.opened_after),
      opened_before: time(until, filter.opened_before),
    };
    return hasOutcome(now.state, now.outcome || "exceeded") ? now : { ...now, state: "" };
  }

  function typed() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      timer = 0;
      location.replace(filterAddress(current()));
    }, PAUSE);
  }

  function submitted(event) {
    event.preventDefault();
    clearTimeout(timer);
    timer = 0;
    const added = label.value.trim();
    label.value = "";
    const now = current();
    location.hash = filterAddress(added && !now.label.includes(added) ? { ...now, label: [...now.label, added] } : now);
    if (document.activeElement === key) entered();
  }

  function chip(word, without) {
    return make("li", {}, make("a", { href: filterAddress({ ...filter, ...without }), "aria-label": `Without the ${word}`, "data-key": word }, word.replace("label ", "")));
  }

  function fillTimes() {
    after.value = localTime(filter.opened_after);
    until.value = localTime(filter.opened_before);
  }
  addEventListener("preference", fillTimes);

  // Without counts (null), the tabs have only names.
  function showCounts(counts) {
    before = [counts, filter];
    const plus = counts?.exact === false ? "+" : "";
    const many = (state) => counts && `${number(state ? counts.states[state] : counts.total)}${plus}`;
    states.show(
      ["", ...STATES].map((state) => [state, state || "all", many(state)]),
      filter.state,
      (state) => filterAddress({ ...filter, state, outcome: hasOutcome(state, filter.outcome || "exceeded") ? filter.outcome : "" }),
    );
  }

  return {
    node,
    showCounts,
    show(now) {
      const isSame = filterAddress({ ...now, state: "", by: "" }) === filterAddress({ ...before[1], state: "", by: "" });
      filter = now;
      if (!timer) {
        // What is being typed is newer than the address.
        if (key.value !== filter.key_prefix) key.value = filter.key_prefix;
        outcome.value = OUTCOMES.includes(filter.outcome) ? filter.outcome : "";
        fillTimes();
      }
      // State and order have no influence on the counts; the counts of another filter would mislead.
      showCounts(isSame ? before[0] : null);
      const others = [
        ...(filter.key ? [chip(`key ${filter.key}`, { key: "" })] : []),
        ...(filter.parent ? [chip(`parent ${filter.parent}`, { parent: "" })] : []),
        ...filter.label.map((each) => chip(`label ${each}`, { label: filter.label.filter((other) => other !== each) })),
      ];
      chips.hidden = !others.length;
      fill(chips, others);
    },
    stop() {
      clearTimeout(timer);
      removeEventListener("preference", fillTimes);
    },
  };
}
