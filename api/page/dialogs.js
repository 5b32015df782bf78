// Dialogs: a confirmation of what can't be undone, a form, and a secret that is shown once.

import { make, say } from "./dom.js";

// Show a dialog. Confirming it calls `act` with the values of the `fields` by name; an error that `act` throws is shown in
// the dialog. With `typed`, that word must be typed first. Closing the dialog removes it and restores the focus.
export function ask({ typed, body, fields = [], ...rest }) {
  const word =
    typed === undefined
      ? null
      : make("input", {
          id: "typed",
          autocomplete: "off",
          autocapitalize: "off",
          spellcheck: "false",
          inputmode: /^\d+$/.test(typed) ? "numeric" : "text",
          oninput: (event) => {
            dialog.doIt.disabled = event.target.value.trim() !== typed;
          },
        });
  const dialog = show({
    ...rest,
    kind: "button.danger",
    body: [body, ...fields, word && make("label.typed", { for: "typed" }, make("span", {}, "Type ", make("strong", {}, typed), " to confirm"), word)],
    isReady: typed === undefined,
  });
  return dialog.node;
}

// Show a form. Confirming it calls `act` with the fields' values by name. If `act` returns a function, it is called once
// the dialog is closed. An error is shown beside the fields that it names: those of that name, or the one
// that `fieldOf(name)` returns.
export const askFor = (dialog) => show({ ...dialog, kind: "button.primary", isReady: true }).node;

// Show a secret that can't be shown again. Closing the dialog forgets it.
export function showSecret(secret, words) {
  const copy = make("button.primary", { type: "button", onclick: copied }, "Copy");
  const node = showDialog("Its secret", [
    make("p", {}, words),
    make("pre.secret", { tabindex: 0, role: "region", "aria-label": "Secret" }, make("code", {}, secret)),
    make("div.buttons", {}, make("button", { type: "button", onclick: () => node.close() }, "Close"), copy),
  ]);

  async function copied() {
    await copyText(secret, copy);
  }
}

// Copy a text. The button that was pressed confirms it. Return whether it was copied.
export async function copyText(text, button) {
  const word = button.textContent;
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    say("Copied");
  } catch {
    isCopied = false;
    button.textContent = "Copying is not allowed here";
  }
  setTimeout(() => {
    button.textContent = word;
  }, 2000);
  return isCopied;
}

function show({ heading, body, confirm, keep, kind, isReady, act, fieldOf = () => null }) {
  const wrong = make("p.note.trouble", { role: "alert", hidden: true });
  const doIt = make(kind, { type: "submit", disabled: !isReady }, confirm);
  const form = make(
    "form",
    { onsubmit: submitted },
    body,
    wrong,
    make("div.buttons", {}, make("button", { type: "button", onclick: () => node.close() }, keep), doIt),
  );
  const node = showDialog(heading, form);
  const marked = []; // the fields that the last error named

  async function submitted(event) {
    event.preventDefault();
    if (doIt.disabled) return;
    doIt.disabled = true;
    for (const { note, input } of marked.splice(0)) {
      note.remove();
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-describedby");
    }
    try {
      const next = await act(Object.fromEntries(new FormData(form)));
      node.close();
      if (typeof next === "function") next();
    } catch (error) {
      doIt.disabled = false;
      showError(error);
    }
  }

  function showError(error) {
    const others = [];
    for (const { place, expected } of error.problem?.errors ?? []) {
      const name = place.replace(/^body\./, "");
      const input = form.elements.namedItem(name) ?? fieldOf(name);
      if (input) mark(input, expected);
      else others.push(`${name}: ${expected}`);
    }
    wrong.hidden = marked.length > 0 && !others.length;
    wrong.textContent = others.join("; ") || error.message;
    if (marked.length) form.querySelector("[aria-invalid]").focus();
    else if (!form.contains(document.activeElement) || document.activeElement.closest("[inert]")) doIt.focus();
  }

  function mark(input, expected) {
    const note = make("p.wrong", { id: `${input.id}-wrong` }, expected);
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", note.id);
    // Outside its label, which would make it a part of the field's name.
    (input.closest("label") ?? input.parentElement.lastElementChild).after(note);
    marked.push({ note, input });
  }
  return { node, doIt };
}

// Open a dialog. Closing it removes it and restores the focus.
export function showDialog(heading, ...content) {
  const back = document.activeElement;
  const node = make("dialog", { "aria-labelledby": "dialog-heading", onclose: closed }, make("h2", { id: "dialog-heading" }, heading), ...content);

  function closed() {
    node.remove();
    if (back?.isConnected) back.focus();
    // It may have been drawn again.
    else if (back?.dataset.key) document.querySelector(`main [data-key="${CSS.escape(back.dataset.key)}"]`)?.focus();
  }

  document.body.append(node);
  node.showModal();
  return node;
}
