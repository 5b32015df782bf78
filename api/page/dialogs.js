// Confirmation of what can't be undone.

import { make } from "./dom.js";

// Show a dialog. Confirming it calls `act`; an error that `act` throws is shown in the dialog. With `typed`, that word
// must be typed first. Closing the dialog removes it and restores the focus.
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
