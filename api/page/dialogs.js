// What can't be taken back is asked for first.

import { make } from "./dom.js";

// Show a dialog; `act` is called when it is confirmed, and what it throws is shown in it. With `typed`, that word has to
// be typed first. Gone, with the focus back where it was, once it is closed.
export function ask({ heading, body, typed, confirm, keep, act }) {
  const back = document.activeElement;
  const wrong = make("p.note.trouble", { role: "alert", hidden: true });
  const doIt = make("button.danger", { type: "submit", disabled: typed !== undefined }, confirm);
  const word =
    typed === undefined
      ? null
      : make("input", {
          id: "typed",
          autocomplete: "off",
          autocapitalize: "off",
          spellcheck: "false",
          inputmode: "numeric",
          oninput: (event) => {
            doIt.disabled = event.target.value.trim() !== typed;
          },
        });
  const dialog = make(
    "dialog",
    { "aria-labelledby": "dialog-heading", onclose: closed },
    make(
      "form",
      { onsubmit: submitted },
      make("h2", { id: "dialog-heading" }, heading),
      body,
      word && make("label.typed", { for: "typed" }, make("span", {}, "Type ", make("strong", {}, typed), " to confirm"), word),
      wrong,
      make("div.buttons", {}, make("button", { type: "button", onclick: () => dialog.close() }, keep), doIt),
    ),
  );

  async function submitted(event) {
    event.preventDefault();
    if (doIt.disabled) return;
    doIt.disabled = true;
    try {
      await act();
      dialog.close();
    } catch (error) {
      wrong.hidden = false;
      wrong.textContent = error.message;
      doIt.disabled = false;
    }
  }
  function closed() {
    dialog.remove();
    if (back?.isConnected) back.focus();
  }

  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
