// The feed and the commands of processes, newest first, and current.

import * as api from "./api.js";
import { dotted, fill, make } from "./dom.js";
import { number, since } from "./format.js";
import { eventDetails } from "./panels.js";
import { Tail } from "./tail.js";
import { address, field, polled } from "./views.js";

const STEP = 50;

// The positions before the first event that is kept, and of the last one.
async function ends(signal) {
  const { events, next, last } = await api.feed({ limit: 1 }, signal);
  return { first: events.length ? events[0].position - 1 : next, last };
}

const withData = (data) => {
  if (data === null || (typeof data === "object" && !Object.keys(data).length)) return null;
  const text = JSON.stringify(data);
  return make(
    "details.data",
    {},
    make("summary", {}, make("code", {}, text.length > 120 ? `${text.slice(0, 120)}…` : text)),
    make("pre", { tabindex: 0, role: "region", "aria-label": "Data" }, make("code", {}, JSON.stringify(data, null, 2))),
  );
};

// A view of a log. `fields` are the filters: name, word, and placeholder. `line(entry)` returns the parts of a line.
function logView(main, { path, heading, fields, read, line, none }) {
  let filter = {};
  let tail = null;
  let wanted = STEP;
  let lines = new Map();
  const inputs = fields.map(([name, word, placeholder]) => field(name, word, { placeholder, maxlength: 255 }));
  const form = make("form.filter", { role: "search", "aria-label": "Filter", onsubmit: asked }, inputs, make("button", { type: "submit" }, "Filter"));
  const list = make("ol.log", { "aria-label": heading });
  const empty = make("p.empty.quiet", { hidden: true }, none);
  const more = make("button.more", { type: "button", hidden: true, onclick: showMore }, "Look further back");
  const seen = polled(main, { heading, every: 1500 }, async (signal) => {
    const current = (tail ??= new Tail((after, limit, stop) => read({ ...filter, after, limit }, stop), ends));
    try {
      if (!current.isStarted) await current.start(wanted, signal);
      else if (await current.newer(signal)) {
        restart(current);
        return seen.looking.now();
      }
      if (current.entries.length < wanted) await current.older(wanted, signal);
    } catch (error) {
      // What it would read next may have been trimmed.
      restart(current);
      throw error;
    }
    if (current === tail) draw();
  });
  main.append(form, list, empty, more);

  // Begin again at the end of the log. What is shown stays until then.
  function restart(old) {
    if (old !== tail) return;
    tail = null;
    lines.clear();
  }

  const listed = (entry) =>
    make("li", { "data-position": entry.position }, make("span.position", {}, number(entry.position)), line(entry), since(entry.at));

  function draw() {
    const shown = tail.entries.slice(0, wanted);
    lines = new Map(shown.map((entry) => [entry.position, lines.get(entry.position) ?? listed(entry)]));
    const nodes = [...lines.values()];
    nodes.forEach((node, place) => {
      if (list.children[place] !== node) list.insertBefore(node, list.children[place] ?? null);
    });
    while (list.children.length > nodes.length) list.lastChild.remove();
    list.hidden = !shown.length;
    empty.hidden = shown.length > 0;
    more.hidden = !(tail.hasOlder || tail.entries.length > wanted);
  }

  function asked(event) {
    event.preventDefault();
    location.hash = address(path, Object.fromEntries(new FormData(form)));
  }
  function showMore() {
    wanted += STEP;
    seen.looking.now();
  }
  return {
    show(parameters) {
      filter = Object.fromEntries(fields.map(([name]) => [name, parameters.get(name) ?? ""]));
      for (const [name] of fields) form.elements[name].value = filter[name];
      wanted = STEP;
      tail = null;
      lines.clear();
      fill(list);
      seen.looking.now();
    },
    stop: seen.stop,
  };
}

function inWords(event) {
  const parts = event.batch === null ? [] : eventDetails(event);
  return parts.length ? make("span.facts.in-words", {}, dotted(parts)) : null;
}

export function feedView(main) {
  return logView(main, {
    path: "/feed",
    heading: "Feed",
    none: "No events.",
    fields: [
      ["type", "Type", "any"],
      ["batch", "Batch", "its number"],
    ],
    read: async (filter, signal) => {
      const { events, next, last } = await api.feed(filter, signal);
      return { entries: events, next, last };
    },
    line: (event) => [
      make("span.event", {}, event.type),
      make(
        "span.of",
        {},
        event.batch === null
          ? event.key
          : make("a", { href: `#/batches/${event.batch}` }, event.key || `batch ${event.batch}`),
      ),
      inWords(event),
      withData(event.data),
    ],
  });
}

const toInstance = ({ process, instance }) => `#/processes/${encodeURIComponent(process)}/${encodeURIComponent(instance)}`;

export function commandsView(main) {
  return logView(main, {
    path: "/commands",
    heading: "Commands",
    none: "No commands.",
    fields: [
      ["process", "Process", "any"],
      ["type", "Type", "any"],
    ],
    read: async (filter, signal) => {
      const { commands, next, last } = await api.commands(filter, signal);
      return { entries: commands, next, last };
    },
    line: (command) => [
      make("span.event", {}, command.step === command.type ? command.type : `${command.type} (${command.step})`),
      make("span.of", {}, make("a", { href: toInstance(command) }, `${command.process} / ${command.instance}`)),
      withData(command.data),
    ],
  });
}
