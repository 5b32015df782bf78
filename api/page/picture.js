// The picture of a batch: a tile per group, or per several groups of a large batch; a click zooms in.

import * as api from "./api.js";
import { fill, make, setText } from "./dom.js";
import { count, number } from "./format.js";
import { percent } from "./percent.js";

// The server's limit for one response.
const GROUPS = 131072;
const mostTiles = () => (innerWidth < 700 ? 480 : 1500);

// `go({groups, group})` sets the address.
export function pictureSection(batchId, go) {
  let tiles = [];
  let current = 0;
  let open = null;
  let range = null;

  const note = make("p.facts");
  const nearer = make("p.nearer", { hidden: true });
  const grid = make("div.tiles", { role: "group", "aria-label": "Groups", onkeydown: walked, onclick: chosen, onfocusin: focused });
  const legend = make(
    "p.legend",
    { "aria-hidden": "true" },
    make("span.swatch"),
    "pending",
    make("span.ramp"),
    "resolved",
    make("span.swatch.some-failed"),
    "some failed",
  );
  const detail = make("div.detail");
  const node = make(
    "section.picture",
    { "aria-labelledby": "picture-heading" },
    make("div.section-head", {}, make("h2", { id: "picture-heading" }, "Picture"), note, legend),
    nearer,
    grid,
    detail,
  );

  // Draw the groups `zoom` = [first, last]; with null, all that fit into one response.
  async function load(zoom, signal, isLive) {
    const first = zoom?.[0] ?? 0;
    const wide = zoom ? zoom[1] - first + 1 : GROUPS;
    // The response tells how many groups there are; after the first, a second request may be needed.
    const fitting = (groups) => Math.max(1, Math.ceil(Math.min(wide, groups - first) / mostTiles()));
    let per = fitting(range?.groups ?? 0);
    let found = await ask(per);
    const needed = fitting(found.groups);
    if (needed !== per) {
      per = needed;
      found = await ask(per);
    }
    range = { first, per, groups: found.groups, next: found.next, zoom };
    tiles = found.tiles;
    draw(found, isLive);

    function ask(groups) {
      const limit = Math.min(4096, Math.max(1, Math.ceil(wide / groups)));
      return api.picture(batchId, first, limit, groups, signal);
    }
  }

  function draw(found, isLive) {
    const several = range.per > 1;
    const each = several ? `${number(range.per)} groups` : "group";
    setText(
      note,
      found.groups
        ? `a tile for each ${each} of ${number(found.group_size)} items`
        : isLive ? "It shows here once items are issued." : "The batch has no items.",
    );
    legend.hidden = !found.groups;
    showWay(found);
    grid.dataset.size = tiles.length <= 48 ? "large" : tiles.length <= 240 ? "middle" : tiles.length <= 900 ? "small" : "tiny";
    while (grid.children.length > tiles.length) grid.lastChild.remove();
    while (grid.children.length < tiles.length) grid.append(make("button.tile", { type: "button", tabindex: -1 }));
    current = Math.min(current, Math.max(tiles.length - 1, 0));
    tiles.forEach((tile, place) => paint(grid.children[place], tile, place));
  }

  function paint(button, tile, place) {
    const share = tile.issued ? tile.resolved / tile.issued : 0;
    const name = tile.groups === 1 ? `Group ${tile.group}` : `Groups ${tile.group} to ${tile.group + tile.groups - 1}`;
    const words = `${name}: ${percent(tile.resolved, tile.issued)} % of ${count(tile.issued, "item")} resolved${
      tile.failed ? `, ${number(tile.failed)} failed` : ""
    }`;
    if (button.title !== words) {
      button.title = words;
      button.setAttribute("aria-label", words);
      button.style.setProperty("--share", share);
      button.dataset.state = share === 1 ? "full" : share === 0 ? "none" : "some";
      button.classList.toggle("has-failed", tile.failed > 0);
      button.classList.toggle("all-failed", tile.failed > 0 && tile.failed === tile.resolved);
    }
    button.tabIndex = place === current ? 0 : -1;
    if (tile.groups === 1) button.setAttribute("aria-pressed", String(open === tile.group));
    else button.removeAttribute("aria-pressed");
  }

  function showWay(found) {
    const whole = range.first === 0 && range.next === null;
    nearer.hidden = whole;
    if (whole) return;
    const last = (range.next ?? found.groups) - 1;
    const wide = range.zoom ? range.zoom[1] - range.zoom[0] + 1 : last - range.first + 1;
    const step = (first, text) =>
      make("a", { href: go.address({ groups: [first, Math.min(first + wide, found.groups) - 1] }), "data-key": text }, text);
    fill(
      nearer,
      range.zoom ? make("a", { href: go.address({}), "data-key": "all" }, "all groups") : null,
      make("span", {}, `groups ${number(range.first)} to ${number(last)} of ${number(found.groups)}`),
      range.first > 0 ? step(Math.max(0, range.first - wide), "earlier") : null,
      range.next === null ? null : step(range.next, "later"),
    );
  }

  function chosen(event) {
    const place = [...grid.children].indexOf(event.target.closest(".tile"));
    if (place < 0) return;
    const tile = tiles[place];
    if (tile.groups > 1) {
      current = 0;
      go({ groups: [tile.group, tile.group + tile.groups - 1] });
      refocus = true;
    } else {
      go({ groups: range.zoom, group: open === tile.group ? null : tile.group });
    }
  }

  let refocus = false;

  function focused(event) {
    const place = [...grid.children].indexOf(event.target);
    if (place >= 0) setCurrent(place);
  }

  function setCurrent(place) {
    if (grid.children[current]) grid.children[current].tabIndex = -1;
    current = place;
    grid.children[place].tabIndex = 0;
  }

  function columns() {
    const top = grid.firstChild.offsetTop;
    let many = 0;
    for (const each of grid.children) {
      if (each.offsetTop !== top) break;
      many++;
    }
    return many;
  }

  function walked(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !tiles.length) return;
    const last = tiles.length - 1;
    const to = {
      ArrowRight: () => current + 1,
      ArrowLeft: () => current - 1,
      ArrowDown: () => current + columns(),
      ArrowUp: () => current - columns(),
      Home: () => 0,
      End: () => last,
      PageDown: () => Math.min(last, current + 5 * columns()),
      PageUp: () => Math.max(0, current - 5 * columns()),
    }[event.key]?.();
    if (to === undefined) return;
    event.preventDefault();
    if (to < 0 || to > last) return;
    setCurrent(to);
    grid.children[to].focus();
  }

  return {
    node,
    detail,
    async load(zoom, signal, isLive) {
      await load(zoom, signal, isLive);
      if (refocus && tiles.length) {
        refocus = false;
        grid.children[0].focus();
      }
    },
    mark(group) {
      open = group;
      tiles.forEach((tile, place) => paint(grid.children[place], tile, place));
    },
    focusOn(group) {
      const place = tiles.findIndex((tile) => tile.group <= group && group < tile.group + tile.groups);
      if (place >= 0) {
        setCurrent(place);
        grid.children[place].focus();
      }
    },
  };
}
