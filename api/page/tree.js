// The tree of a batch: its ancestors above the heading, its children in a panel. A child's own children are read when
// it is opened.

import * as api from "./api.js";
import { fill, make, setText } from "./dom.js";
import { count, number, title } from "./format.js";
import { panel } from "./panels.js";
import { amounts, progressBar, stateMark } from "./pieces.js";

const STEP = 20;
const DEEPEST = 20; // ancestors that are read

const parentOf = (batch) => (batch.parent === null ? null : Number(batch.parent.split(":")[0]));

const linkTo = (batch) => make("a", { href: `#/batches/${batch.id}` }, title(batch));

// The batches above this one, the topmost first. A session may not be allowed to read all of them.
export async function ancestors(batch, signal) {
  const found = [];
  for (let id = parentOf(batch); id !== null && found.length < DEEPEST; id = parentOf(found[0])) {
    try {
      found.unshift(await api.batch(id, signal));
    } catch (error) {
      if (error.code !== "batch_not_found" && error.status !== 403) throw error;
      break;
    }
  }
  return found;
}

export function showAncestors(node, found) {
  fill(node, make("a", { href: "#/" }, "All batches"), found.flatMap((batch) => [make("span.step", { "aria-hidden": "true" }, "/"), linkTo(batch)]));
}

export const children = (id, signal) => api.batches({ parent: id, limit: STEP }, signal);

export function childrenPanel() {
  const { node, draw, hide } = panel("children", "Children");
  const branches = branch();
  const bar = progressBar();
  const words = make("span.facts");
  const sums = make("div.sums", { hidden: true }, bar.node, words);
  return {
    node,
    // The panel's body is drawn once; after that, its branch updates its own lines. `tree` has the sums of all batches
    // below the parent, and of the parent.
    show(parent, page, tree) {
      if (!page.batches.length && page.next === null) return hide();
      draw(parent, () => [sums, branches.node]);
      branches.show(parent, page);
      sums.hidden = tree === null;
      if (tree === null) return;
      const all = Object.values(tree.batches).reduce((sum, each) => sum + each, 0);
      const live = tree.batches.open + tree.batches.sealed;
      bar.update(tree);
      setText(words, `${tree.truncated ? "the first " : ""}${count(all, "batch", "batches")} with this one, ${number(live)} of them live: ${amounts(tree)}${tree.failed ? `, ${number(tree.failed)} failed` : ""}`);
    },
  };
}

// The children of one batch.
function branch() {
  const lines = new Map();
  const list = make("ul.tree");
  const rest = make("p.rest", { hidden: true });
  return {
    node: make("div.branch", {}, list, rest),
    show(parent, { batches, next }) {
      for (const [id, line] of lines) {
        if (batches.some((batch) => batch.id === id)) continue;
        line.node.remove();
        lines.delete(id);
      }
      batches.forEach((batch, place) => {
        if (!lines.has(batch.id)) lines.set(batch.id, child(batch));
        const line = lines.get(batch.id);
        line.update(batch);
        if (list.children[place] !== line.node) list.insertBefore(line.node, list.children[place] ?? null);
      });
      rest.hidden = next === null;
      const address = `#/?parent=${parent}`;
      if (next !== null && !rest.children.length) fill(rest, make("a", { href: address }, batches.length ? `More than ${count(batches.length, "child", "children")}: all in the list` : "Children: in the list"));
    },
  };
}

function child(batch) {
  const state = stateMark();
  const bar = progressBar();
  const facts = make("span.facts");
  const under = branch();
  const none = make("p.quiet", { hidden: true }, "It has no children.");
  const below = make("div", { hidden: true }, under.node, none);
  const open = make("button.branch-open", { type: "button", "aria-expanded": "false", "aria-label": `Children of ${title(batch)}`, onclick: toggle });
  const item = batch.parent.split(":").slice(1).join(":");

  async function toggle() {
    below.hidden = !below.hidden;
    open.setAttribute("aria-expanded", String(!below.hidden));
    if (!below.hidden) await read();
  }

  // Read again with each update of the line, so that an open branch is as current as its parent.
  async function read() {
    const page = await children(batch.id).catch(() => null);
    if (page === null) return;
    none.hidden = page.batches.length > 0 || page.next !== null;
    under.show(batch.id, page);
  }

  return {
    node: make("li", { "data-batch": batch.id }, make("div.line", {}, open, make("div.named", {}, linkTo(batch), make("span.id", {}, `batch ${batch.id}, item ${item}`)), bar.node, facts, state.node), below),
    update(now) {
      state.update(now);
      bar.update(now);
      const text = `${amounts(now)}${now.failed ? `, ${number(now.failed)} failed` : ""}`;
      if (facts.textContent !== text) facts.textContent = text;
      if (!below.hidden) read();
    },
  };
}
