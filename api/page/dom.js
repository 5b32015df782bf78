// Builds elements. Text is never parsed as HTML, since any client may choose keys, labels and reasons.

// make("p.note", {title: "…", onclick: f}, "text", node, null)
export function make(what, properties, ...children) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Replace the children, and keep the focus on the one with the same data-key.
export function fill(parent, ...children) {
  const focused = parent.contains(document.activeElement) ? document.activeElement.closest("[data-key]") : null;
  parent.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  if (focused && !focused.isConnected) {
    for (const node of parent.querySelectorAll("[data-key]")) {
      if (node.dataset.key === focused.dataset.key) return node.focus({ preventScroll: true });
    }
  }
}

// The parts, separated by dots.
export const dotted = (parts) =>
  parts.flatMap((part, place) => (place ? [make("span.dot", { "aria-hidden": "true" }, "·"), part] : [part]));

// Announce a text to screen readers.
export function say(text) {
  const said = document.getElementById("said");
  said.textContent = "";
  said.textContent = text;
}
