// Draws one group's bits. A cursor, moved by pointer or keyboard, describes the item below it.

import { make, setText } from "./dom.js";
import { count, itemId, number } from "./format.js";
import { EMPTY } from "./pieces.js";

const STATES = ["pending", "acked", "failed", "skipped"];
const BYTE = 8;

function decoded(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

// `reasonOf(item id)` returns why the item failed, where that is known.
export function bitsPanel(batch, { reasonOf, close }) {
  let group = null;
  let states = new Uint8Array();
  let at = 0;
  let named = null; // the item that the address selected
  let columns = 64;
  let cell = 8;

  const heading = make("h3", { id: "bits-heading", tabindex: -1 });
  const summary = make("p.facts");
  const canvas = make("canvas", { "aria-hidden": "true" });
  const field = make(
    "div.field",
    {
      role: "slider",
      tabindex: 0,
      "aria-label": "Item",
      "aria-valuemin": 0,
      onkeydown: walked,
      onpointermove: pointed,
      onpointerdown: pointed,
    },
    canvas,
  );
  const readout = make("output.readout");
  const next = Object.fromEntries(
    ["pending", "failed"].map((name) => [
      name,
      make("button", { type: "button", onclick: () => jump(name) }, `Next ${name}`),
    ]),
  );
  const node = make(
    "section.bits",
    { "aria-labelledby": "bits-heading", onkeydown: (event) => event.key === "Escape" && close() },
    make(
      "div.bits-head",
      {},
      heading,
      summary,
      make("div.buttons", {}, next.pending, next.failed, make("button", { type: "button", onclick: close }, "Close")),
    ),
    make("p.current", {}, readout),
    field,
  );

  const resized = new ResizeObserver(draw);
  resized.observe(node);
  addEventListener("theme", draw);

  function layOut() {
    const width = field.clientWidth;
    if (!width || !group) return false;
    // Rows of whole bytes, with the cell size that leaves the least width unused; small groups have large cells.
    const least = group.issued <= 1024 ? 12 : group.issued <= 8192 && width > 500 ? 7 : 5;
    const wide = (side) => Math.max(BYTE, Math.floor(width / side / BYTE) * BYTE);
    cell = [least, least + 1, least + 2].reduce((best, side) => (wide(side) * side > wide(best) * best ? side : best));
    columns = wide(cell);
    return true;
  }

  function draw() {
    if (!layOut()) return;
    const rows = Math.ceil(states.length / columns);
    const scale = devicePixelRatio || 1;
    canvas.width = columns * cell * scale;
    canvas.height = rows * cell * scale;
    canvas.style.width = `${columns * cell}px`;
    canvas.style.height = `${rows * cell}px`;
    const style = getComputedStyle(node);
    const colours = ["--bit-pending", "--acked", "--failed", "--acked"].map((name) => style.getPropertyValue(name).trim());
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    // A pending item is a dot, an acked one a square, a failed one a square with a hole, a skipped one half a
    // square, so that colour isn't needed.
    const dot = Math.max(1, Math.round(cell * 0.34));
    for (let index = 0; index < states.length; index++) {
      const x = (index % columns) * cell;
      const y = Math.floor(index / columns) * cell;
      pen.fillStyle = colours[states[index]];
      if (states[index] === 0) pen.fillRect(x + (cell - dot) / 2, y + (cell - dot) / 2, dot, dot);
      else pen.fillRect(x, y, cell, cell);
      if (states[index] === 2) pen.clearRect(x + (cell - dot) / 2, y + (cell - dot) / 2, dot, dot);
      if (states[index] === 3) pen.clearRect(x, y, cell, cell / 2);
    }
    // A fine grid with stronger lines between bytes, so that items can be counted.
    pen.fillStyle = style.getPropertyValue("--raised").trim();
    for (let column = 1; column < columns; column++) {
      pen.globalAlpha = column % BYTE ? 0.22 : 0.6;
      pen.fillRect(column * cell - 0.5, 0, 1, rows * cell);
    }
    pen.globalAlpha = 0.22;
    for (let row = 1; row < rows; row++) pen.fillRect(0, row * cell - 0.5, columns * cell, 1);
    pen.globalAlpha = 1;
    pen.strokeStyle = style.getPropertyValue("--ink").trim();
    pen.lineWidth = 2;
    pen.strokeRect((at % columns) * cell, Math.floor(at / columns) * cell, cell, cell);
  }

  function move(to) {
    at = Math.min(Math.max(to, 0), states.length - 1);
    tell();
    draw();
  }

  function tell() {
    const id = itemId(batch.id, group.group * batch.group_size + at, batch.group_size);
    const state = STATES[states[at]];
    const reason = state === "failed" ? reasonOf(id) : undefined;
    const words = reason === undefined ? state : `${state}: ${reason || EMPTY}`;
    field.setAttribute("aria-valuenow", at);
    field.setAttribute("aria-valuetext", `${id}, ${words}`);
    readout.dataset.state = state;
    readout.replaceChildren(make("code", {}, id), make("span.word", {}, words));
  }

  function walked(event) {
    const steps = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: columns,
      ArrowUp: -columns,
      PageDown: 8 * columns,
      PageUp: -8 * columns,
      Home: -Infinity,
      End: Infinity,
    };
    const step = steps[event.key];
    if (step === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (Math.abs(step) === columns && (at + step < 0 || at + step >= states.length)) return;
    move(at + step);
  }

  function pointed(event) {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / cell);
    const index = Math.floor((event.clientY - box.top) / cell) * columns + column;
    if (column >= 0 && column < columns && index >= 0 && index < states.length && index !== at) move(index);
  }

  function jump(name) {
    const wanted = STATES.indexOf(name);
    const found = states.indexOf(wanted, at + 1);
    move(found >= 0 ? found : states.indexOf(wanted));
    field.focus({ preventScroll: true });
  }

  return {
    node,
    focus: () => field.focus(),
    // Show the response of `GET …/groups/{group}`, and select the item at index `item` if it isn't selected yet.
    show(found, item = null) {
      const other = group?.group !== found.group;
      group = found;
      const resolved = decoded(found.bits.resolved);
      const failed = decoded(found.bits.failed);
      const skipped = decoded(found.bits.skipped);
      states = Uint8Array.from({ length: found.issued }, (_, index) => {
        const bit = 1 << (index % 8);
        if (!(resolved[index >> 3] & bit)) return 0;
        return failed[index >> 3] & bit ? 2 : skipped[index >> 3] & bit ? 3 : 1;
      });
      const pending = found.issued - found.resolved;
      setText(heading, `Group ${found.group}`);
      setText(
        summary,
        `${count(found.issued, "item")}: ${number(found.resolved - found.failed - found.skipped)} acked, ${number(found.failed)} failed, ${found.skipped ? `${number(found.skipped)} skipped, ` : ""}${number(pending)} pending`,
      );
      next.pending.disabled = pending === 0;
      next.failed.disabled = found.failed === 0;
      field.setAttribute("aria-valuemax", states.length - 1);
      if (item !== null && (other || item !== named)) at = item;
      else if (other) at = Math.max(0, states.indexOf(pending ? 0 : found.failed ? 2 : 1));
      named = item;
      at = Math.min(at, states.length - 1);
      tell();
      draw();
    },
    stop() {
      resized.disconnect();
      removeEventListener("theme", draw);
      node.remove();
    },
  };
}
