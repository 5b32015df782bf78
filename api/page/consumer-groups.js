// Consumer groups: the list, and one with its workers, the owner of each partition, and how far it is behind.

import * as api from "./api.js";
import { dotted, fill, make } from "./dom.js";
import { count, duration, number, since, until } from "./format.js";
import { panel } from "./panels.js";
import { choices, polled, table } from "./views.js";

const HOME = "#/consumer-groups";
const STEP = 256;

const toGroup = (name) => `${HOME}/${encodeURIComponent(name)}`;

export function groupsView(main) {
  const groups = table("Consumer groups", ["Name", "#Workers", "#Owned", "#Partitions", "Created"], (group) => ({
    attributes: { "data-group": group.name },
    cells: [
      make("a", { href: toGroup(group.name), "data-key": group.name }, group.name),
      group.workers ? number(group.workers) : make("span.warn", {}, "none"),
      make(group.owned < group.partitions ? "span.warn" : "span", {}, number(group.owned)),
      number(group.partitions),
      since(group.created_at),
    ],
  }));
  const empty = make("p.empty.quiet", { hidden: true }, "No consumer groups yet: a worker creates its own when it begins.");
  const seen = polled(main, { heading: "Consumer groups" }, async (signal) => {
    const found = [];
    let cursor = null;
    do {
      const page = await api.groups(cursor, signal);
      found.push(...page.groups);
      cursor = page.next;
    } while (cursor !== null);
    groups.draw(found);
    groups.node.hidden = !found.length;
    empty.hidden = found.length > 0;
  });
  main.append(groups.node, empty);
  return seen;
}

// What needs attention first: without an owner, then by lag.
const SHOWN = {
  "": ["all", () => true],
  unowned: ["without an owner", (position) => position.owner === null],
  behind: ["behind", (position) => position.lag > 0],
};

export function groupView(main, name) {
  let chosen = "";
  let wanted = STEP;
  const about = make("p.about.facts");
  const workers = panel("workers", "Workers");
  const partitions = panel("partitions", "Partitions");
  const workerTable = table("Table of workers", ["Worker", "Lease", "#Partitions", "#Releasing", "#Capacity", "Started", "Last seen"], (worker) => ({
    attributes: { "data-worker": worker.worker },
    cells: [
      worker.worker,
      worker.live ? until(worker.lease_until) : make("span.warn", {}, "expired"),
      number(worker.partitions),
      worker.releasing ? number(worker.releasing) : null,
      worker.capacity === null ? null : number(worker.capacity),
      since(worker.started_at),
      since(worker.last_seen),
    ],
  }));
  const optional = (value) => (value === null ? null : number(value));
  const partitionTable = table("Table of partitions", ["#Partition", "Owner", "#Lag", "#Unfinished", "#Floor", "#Head", "#Epoch", "Committed"], (position) => ({
    attributes: { "data-partition": position.partition },
    cells: [
      number(position.partition),
      position.owner === null
        ? make("span.warn", {}, "nobody")
        : position.release_by === null
          ? position.owner
          : [position.owner, make("span.facts", {}, " releases it, at the latest ", until(position.release_by))],
      optional(position.lag),
      optional(position.outstanding),
      optional(position.floor),
      optional(position.head),
      number(position.epoch),
      position.updated_at && since(position.updated_at),
    ],
  }));
  const tabs = choices("Partitions");
  const more = make("button.more", { type: "button", hidden: true, onclick: showMore }, "Show more");
  const seen = polled(main, { heading: name, up: make("a", { href: HOME }, "All consumer groups") }, async (signal) => {
    show(await api.consumerGroup(name, signal));
  });
  main.append(about, workers.node, partitions.node);

  function show(group) {
    const { positions } = group;
    const lag = positions.reduce((sum, position) => sum + (position.lag ?? 0), 0);
    fill(
      about,
      dotted([
        count(group.partitions, "partition"),
        make("span", { "data-number": "lag" }, `lag ${number(lag)}`),
        `leases of ${duration(group.ttl)}`,
        make("span", {}, "created ", since(group.created_at)),
      ]),
    );
    workers.draw(
      group.workers,
      () => {
        workerTable.draw(group.workers);
        return group.workers.length ? workerTable.node : make("p.quiet", {}, "No worker is in the group.");
      },
      group.workers.length ? `${number(group.workers.filter(({ live }) => live).length)} live` : "",
    );
    const found = positions.filter(SHOWN[chosen][1]).sort((one, other) => (chosen === "behind" ? other.lag - one.lag : one.partition - other.partition));
    partitions.draw([found, chosen, wanted], () => {
      tabs.show(
        Object.entries(SHOWN).map(([value, [word, isShown]]) => [value, word, number(positions.filter(isShown).length)]),
        chosen,
        (value) => toGroup(name) + (value && `?show=${value}`),
      );
      partitionTable.draw(found.slice(0, wanted));
      partitionTable.node.hidden = !found.length;
      more.hidden = found.length <= wanted;
      return [tabs.node, partitionTable.node, more];
    });
  }

  function showMore() {
    wanted += STEP;
    seen.looking.now();
  }
  return {
    show(parameters) {
      chosen = Object.hasOwn(SHOWN, parameters.get("show") ?? "") ? (parameters.get("show") ?? "") : "";
      wanted = STEP;
      seen.looking.now();
    },
    stop: seen.stop,
  };
}
