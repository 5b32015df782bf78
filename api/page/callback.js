// The callback of a batch: where it is told how the batch ended.

import { make } from "./dom.js";
import { panel } from "./panels.js";
import { isLimited, may } from "./session.js";
import { typesOf, webhookState } from "./webhooks.js";

export function callbackPanel() {
  const { node, draw, hide } = panel("callback", "Callback");
  return {
    node,
    show(callback) {
      if (callback === null) return hide();
      const url = make("code", {}, callback.url);
      const isOpen = may("admin") && !isLimited();
      draw([callback.id, callback.state, callback.types], () =>
        make("div.callback", {}, webhookState(callback), isOpen ? make("a", { href: `#/webhooks/${callback.id}`, "data-key": "callback" }, url) : url, make("p.facts", {}, typesOf(callback))),
      );
    },
  };
}
