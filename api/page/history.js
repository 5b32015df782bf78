// How a batch got on: its resolved and failed items over time, as a chart of one batch and as a small line in a table.

import { make, setText } from "./dom.js";
import { duration, rate } from "./format.js";
import { percent } from "./percent.js";

const WIDE = 600; // of a chart's own units; it is stretched to the width of the page
const HIGH = 100;

const svg = (tag, properties) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) node.setAttribute(name, value);
  return node;
};

// The area below the line of one count, from the first point to the last.
function area(points, items, countOf) {
  const start = Date.parse(points[0].at);
  const length = Math.max(1, Date.parse(points.at(-1).at) - start);
  const most = Math.max(1, items);
  const places = points.map((point) => {
    const x = (WIDE * (Date.parse(point.at) - start)) / length;
    const y = HIGH - (HIGH * countOf(point)) / most;
    return `${x.toFixed(1)},${y.toFixed(2)}`;
  });
  return `M0,${HIGH}L${places.join("L")}L${WIDE},${HIGH}Z`;
}

function picture(className) {
  const resolved = svg("path", { class: "resolved" });
  const failed = svg("path", { class: "failed" });
  const node = svg("svg", { class: className, viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img" });
  node.append(resolved, failed);
  return {
    node,
    draw(points, items) {
      resolved.setAttribute("d", area(points, items, (point) => point.resolved));
      failed.setAttribute("d", area(points, items, (point) => point.failed));
      node.setAttribute("aria-label", words(points, items));
    },
  };
}

const seconds = (from, to) => (Date.parse(to.at) - Date.parse(from.at)) / 1000;

// Since when the counts are what they are now.
const restingSince = (points) => points.find(({ resolved, failed }) => resolved === points.at(-1).resolved && failed === points.at(-1).failed);

function words(points, items) {
  const last = points.at(-1);
  const share = items ? `${percent(last.resolved, items)} % resolved` : "no items";
  const rest = seconds(restingSince(points), last);
  return `${share} after ${duration(seconds(points[0], last))}${last.resolved ? `, the last of them ${duration(rest)} before the end of the line` : ""}`;
}

// The fastest part of the line, in items a second.
function fastest(points) {
  let most = 0;
  points.slice(1).forEach((point, place) => {
    const took = seconds(points[place], point);
    if (took >= 1) most = Math.max(most, (point.resolved - points[place].resolved) / took);
  });
  return most;
}

export function smallLine(points, items) {
  const { node, draw } = picture("line-of-time");
  draw(points, items);
  return node;
}

export function chart() {
  const { node, draw } = picture("chart");
  const start = make("span");
  const speed = make("span");
  const end = make("span");
  const figure = make("figure.history", { hidden: true }, node, make("figcaption", {}, start, speed, end));
  return {
    node: figure,
    show(batch, points) {
      const [first, last] = [points[0], points.at(-1)];
      figure.hidden = !last.resolved || seconds(first, last) < 2;
      if (figure.hidden) return;
      draw(points, Math.max(batch.items, last.resolved));
      const most = fastest(points);
      const rest = seconds(restingSince(points), last);
      setText(start, "opened");
      setText(speed, most > 0 ? `at most ${rate(most)}` : "");
      setText(end, batch.ended_at ? `after ${duration(seconds(first, last))}` : rest > 5 ? `unchanged for ${duration(rest)}` : "now");
    },
  };
}
