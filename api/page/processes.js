// Process managers: the list, their instances, and one instance with its state, its events and its parked events.

import * as api from "./api.js";
import { ask } from "./dialogs.js";
import { dotted, fill, make, say } from "./dom.js";
import { count, number, since, until } from "./format.js";
import { panel } from "./panels.js";
import { may } from "./session.js";
import { choices, drawn, polled } from "./views.js";

const STEP = 50;
const MOST = 1000;
const STATUSES = ["running", "finished", "parked"];

const home = "#/processes";
const toProcess = (name) => `${home}/${encodeURIComponent(name)}`;
const toInstance = (name, instance) => `${toProcess(name)}/${encodeURIComponent(instance)}`;

function mark(status) {
  return make("span.state", { "data-state": { running: "open", finished: "succeeded" }[status] ?? "complete" }, status);
}

export function processesView(main) {
  const list = make("ol.processes", { "aria-label": "Processes" });
  const empty = make("p.empty.quiet", { hidden: true }, "No processes yet: a worker defines its own when it begins.");
  const draw = drawn(list, (each) =>
    make(
      "li",
      { "data-process": each.name },
      make("a.named", { href: toProcess(each.name), "data-key": each.name }, each.name),
      make(
        "p.facts",
        {},
        dotted(
          [
            `${number(each.running)} running`,
            `${number(each.finished)} finished`,
            each.parked ? make("a.failures", { href: `${toProcess(each.name)}?status=parked` }, count(each.parked, "parked event")) : null,
            each.timers ? count(each.timers, "timer") : null,
            each.unnamed ? `${count(each.unnamed, "event")} without an instance` : null,
            `handled up to position ${number(each.floor)}`,
          ].filter(Boolean),
        ),
      ),
    ),
  );
  const seen = polled(main, { heading: "Processes" }, async (signal) => {
    const { processes } = await api.processes(signal);
    draw(processes);
    list.hidden = !processes.length;
    empty.hidden = processes.length > 0;
  });
  main.append(list, empty);
  return seen;
}

export function instancesView(main, process) {
  let status = "";
  let wanted = STEP;
  const states = choices("Status");
  const list = make("ol.processes", { "aria-label": "Instances" });
  const empty = make("p.empty.quiet", { hidden: true }, "No instances.");
  const more = make("button.more", { type: "button", hidden: true, onclick: showMore }, "Show more");
  const draw = drawn(list, (each) =>
    make(
      "li",
      { "data-instance": each.instance },
      make("a.named", { href: toInstance(process, each.instance), "data-key": each.instance }, each.instance),
      mark(each.status),
      make(
        "p.facts",
        {},
        dotted([
          `version ${number(each.version)}`,
          ...(each.parked ? [make("span.failures", {}, count(each.parked, "parked event"))] : []),
          make("span", {}, each.finished_at ? "finished " : "changed ", since(each.finished_at ?? each.updated_at)),
        ]),
      ),
    ),
  );
  const seen = polled(main, { heading: process, up: make("a", { href: home }, "All processes") }, async (signal) => {
    const asked = status;
    const page = await api.instances(process, { status: asked, limit: wanted }, signal);
    if (asked !== status) return;
    draw(page.instances);
    list.hidden = !page.instances.length;
    empty.hidden = page.instances.length > 0;
    more.hidden = page.next === null || wanted >= MOST;
  });
  main.append(states.node, list, empty, more);

  function showMore() {
    wanted = Math.min(wanted + STEP, MOST);
    seen.looking.now();
  }

  return {
    show(parameters) {
      status = parameters.get("status") ?? "";
      wanted = STEP;
      states.show(
        ["", ...STATUSES].map((each) => [each, each || "all"]),
        status,
        (each) => toProcess(process) + (each && `?status=${each}`),
      );
      seen.looking.now();
    },
    stop: seen.stop,
  };
}

export function instanceView(main, process, instance) {
  const about = make("p.about.facts");
  const state = panel("state", "State");
  const history = panel("history", "Events");
  const timers = panel("timers", "Timers");
  const commands = panel("commands", "Commands");
  const up = make("a", { href: toProcess(process) }, process);
  const seen = polled(main, { heading: instance, up }, async (signal) => {
    const found = await api.instance(process, instance, signal);
    show(found);
  });
  main.append(
    about,
    make("div.panels", {}, make("div", {}, state.node, timers.node, commands.node), make("div", {}, history.node)),
  );

  function retry(event) {
    ask({
      heading: "Handle the event again?",
      body: make("p", {}, "Its handler failed. Deploy better code first, or it is parked again: ", make("code", {}, event), "."),
      confirm: "Handle again",
      keep: "Leave it",
      async act() {
        const { retrying } = await api.retryParked(process, instance, event);
        say(retrying ? "It is handled again" : "It was no longer parked");
        seen.looking.now();
      },
    });
  }

  function show(found) {
    fill(
      about,
      dotted([
        mark(found.status),
        `version ${number(found.version)}`,
        make("span", {}, "started ", since(found.created_at)),
        found.finished_at
          ? make("span", {}, "finished ", since(found.finished_at))
          : make("span", {}, "changed ", since(found.updated_at)),
      ]),
    );
    state.draw(found.state, () => [
      make("pre", { tabindex: 0, role: "region", "aria-label": "The state" }, make("code", {}, JSON.stringify(found.state, null, 2))),
    ]);
    if (found.history.length) {
      history.draw(
        found.history,
        () => make("ol.events.received", {}, found.history.map(received)),
        found.parked ? `${number(found.parked)} parked` : "",
      );
    } else history.hide();
    if (found.timers.length) {
      timers.draw(found.timers, () =>
        make(
          "ul.events",
          {},
          found.timers.map((each) => make("li", {}, make("span.event", {}, each.timer), until(each.due_at))),
        ),
      );
    } else timers.hide();
    if (found.commands.length) {
      commands.draw(found.commands, () =>
        make(
          "ol.events",
          {},
          found.commands.map((each) =>
            make(
              "li",
              { "data-command": each.id },
              make("span.position", {}, number(each.position)),
              make("span.event", {}, each.step === each.type ? each.type : `${each.type} (${each.step})`),
              since(each.at),
            ),
          ),
        ),
      );
    } else commands.hide();
  }

  const received = (each) =>
    make(
      "li",
      { "data-event": each.event, "data-status": each.status },
      make("span.position", {}, number(each.position)),
      make("span.event", {}, each.event),
      make("span.delivery-state", {}, each.status),
      since(each.at),
      each.status === "parked" && may("consume")
        ? make("button", { type: "button", "data-key": `retry ${each.event}`, onclick: () => retry(each.event) }, "Retry")
        : null,
      each.error === null
        ? each.status === "parked" ? make("span.quiet", {}, "waits behind an earlier event") : null
        : make("pre.error", { tabindex: 0, role: "region", "aria-label": `Why ${each.event} failed` }, make("code", {}, each.error)),
    );

  return seen;
}
