// Webhooks: the list, and a new one, whose secret is shown once.

import * as api from "./api.js";
import { askFor, showSecret } from "./dialogs.js";
import { make } from "./dom.js";
import { number, since } from "./format.js";
import { field, polled, table } from "./views.js";

export const typesOf = (webhook) => (webhook.types === null ? "all events" : webhook.types.join(", "));

export function webhookState(webhook) {
  return make("span.state", { "data-state": webhook.state === "active" ? "succeeded" : "expired" }, webhook.state);
}

export function webhooksView(main) {
  const webhooks = table("Webhooks", ["URL", "State", "Events", "#Behind", "Created"], ({ webhook, behind }) => ({
    attributes: { "data-webhook": webhook.id },
    cells: [
      [
        make("a", { href: `#/webhooks/${webhook.id}`, "data-key": webhook.id }, webhook.url),
        webhook.label === null ? null : make("small.quiet", {}, webhook.label),
      ],
      webhookState(webhook),
      typesOf(webhook),
      webhook.state === "active" ? number(behind) : null,
      since(webhook.created_at),
    ],
  }));
  const empty = make("p.empty.quiet", { hidden: true }, "No webhooks yet. A webhook gets each event of the feed as a signed POST.");
  const create = make("button", { type: "button", onclick: askToCreate }, "New webhook…");
  const seen = polled(main, { heading: "Webhooks", actions: [create] }, async (signal) => {
    const found = [];
    let cursor = null;
    do {
      const page = await api.webhooks(cursor, signal);
      found.push(...page.webhooks);
      cursor = page.next;
    } while (cursor !== null);
    const { last } = await api.feed({ limit: 1 }, signal);
    webhooks.draw(found.map((webhook) => ({ webhook, behind: Math.max(0, last - webhook.position) })));
    webhooks.node.hidden = !found.length;
    empty.hidden = found.length > 0;
  });
  main.append(webhooks.node, empty);

  function askToCreate() {
    const form = [
      field("url", "URL", { type: "url", required: true, maxlength: 2048, placeholder: "https://…" }),
      field("types", "Events", { placeholder: "all" }, "or types, separated by blanks: batch.completed batch.expired"),
      field("label", "Label", { maxlength: 255, placeholder: "your name for it" }),
    ];
    askFor({
      heading: "New webhook",
      body: form,
      confirm: "Create",
      keep: "Don’t create",
      async act(values) {
        const types = values.types.split(/[\s,]+/).filter(Boolean);
        const wanted = { url: values.url, types: types.length ? types : null, label: values.label || null };
        const created = await api.createWebhook(wanted).catch((error) => {
          // A second one would get each event too.
          if (error.status === 0) error.message += " The webhook may have been created: look at the list before you try again.";
          throw error;
        });
        seen.looking.now();
        return () => showSecret(created.secret, "Receivers verify signatures with it. It is never shown again.");
      },
    });
  }
  return seen;
}
