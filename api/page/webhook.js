// One webhook: its log of deliveries with all attempts, a test, redelivery, a new secret, and its end.

import * as api from "./api.js";
import { ask, askFor, showSecret } from "./dialogs.js";
import { dotted, fill, make, say } from "./dom.js";
import { count, number, since, until } from "./format.js";
import { address, choices, drawn, polled } from "./views.js";
import { typesOf, webhookState } from "./webhooks.js";

const STEP = 50;
const MOST = 1000;
const STATES = ["pending", "delivered", "dead"];
const OVERLAPS = [["86400", "a day"], ["604800", "seven days"], ["3600", "an hour"], ["0", "no time: it ends now"]];

export function webhookView(main, id) {
  let state = "";
  let wanted = STEP;
  const about = make("p.about.facts");
  const result = make("p.note", { role: "status", hidden: true });
  const states = choices("State");
  const list = make("ol.deliveries.log-of", { "aria-label": "Deliveries" });
  const empty = make("p.empty.quiet", { hidden: true }, "No deliveries.");
  const more = make("button.more", { type: "button", hidden: true, onclick: showMore }, "Show more");
  const button = (word, act, kind = "button") => make(kind, { type: "button", onclick: act }, word);
  const test = button("Send a test", sendTest);
  const redeliver = button("Redeliver dead…", askToRedeliver);
  const actions = [test, redeliver, button("Rotate secret…", askToRotate), button("Delete…", askToDelete, "button.cancel")];
  const draw = drawn(list, line);
  const seen = polled(main, { heading: `Webhook ${id}`, up: make("a", { href: "#/webhooks" }, "All webhooks"), actions }, look);
  main.append(about, result, states.node, list, empty, more);

  async function look(signal) {
    const asked = state;
    const [webhook, page] = await Promise.all([api.webhook(id, signal), api.webhookLog(id, { state: asked, limit: wanted }, signal)]);
    if (asked !== state) return;
    const facts = [
      webhookState(webhook),
      make("code", {}, webhook.url),
      webhook.label,
      typesOf(webhook),
      `planned up to position ${number(webhook.position)}`,
      make("span", {}, "created ", since(webhook.created_at)),
      webhook.overlap_until && make("span", {}, "the old secret ends ", until(webhook.overlap_until)),
    ];
    fill(about, dotted(facts.filter(Boolean)));
    redeliver.hidden = test.hidden = webhook.state === "disabled";
    draw(page.deliveries.map((delivery) => ({ delivery, canRedeliver: webhook.state !== "disabled" })));
    list.hidden = !page.deliveries.length;
    empty.hidden = page.deliveries.length > 0;
    more.hidden = page.next === null || wanted >= MOST;
  }

  function line({ delivery, canRedeliver }) {
    const { position, type, batch, attempts, log, next_attempt_at: next } = delivery;
    const tries = log.map((attempt) =>
      make("li", {}, dotted([since(attempt.at), attempt.status === null ? "no response" : `answered ${attempt.status}`, attempt.error, `${number(attempt.milliseconds)} ms`].filter(Boolean))),
    );
    return make(
      "li",
      { "data-state": delivery.state, "data-position": position },
      make("span.delivery-state", {}, delivery.state),
      make("span.event", {}, `${type} `, batch === null ? null : make("a", { href: `#/batches/${batch}`, "data-key": `batch ${position}` }, `batch ${batch}`)),
      make(
        "div.tried",
        {},
        dotted([
          `position ${number(position)}`,
          attempts ? count(attempts, "attempt") : log.length ? "redelivered" : "not tried yet",
          delivery.state === "pending" && attempts > 0 && next ? make("span", {}, "next attempt ", until(next)) : null,
        ].filter(Boolean)),
        tries.length ? make("ol.attempts", {}, tries) : null,
      ),
      canRedeliver && make("button", { type: "button", "data-key": `redeliver ${position}`, onclick: () => askAgain(delivery) }, "Redeliver…"),
    );
  }

  function showResult(words, isGood) {
    result.hidden = false;
    result.classList.toggle("trouble", !isGood);
    result.textContent = words;
  }

  async function sendTest() {
    test.disabled = true;
    try {
      const { delivered, status, error, milliseconds } = await api.testWebhook(id);
      const answered = status === null ? "The receiver didn’t respond" : `The receiver answered ${status}`;
      showResult(`${answered} after ${number(milliseconds)} ms${error ? `: ${error}` : ""}.`, delivered);
    } catch (error) {
      showResult(error.message, false);
    }
    test.disabled = false;
  }

  function askAgain({ position, type }) {
    ask({
      heading: "Deliver it again?",
      body: make("p", {}, `“${type}” at position ${number(position)} is sent once more. A receiver that already has it sees the same webhook-id again.`),
      confirm: "Deliver again",
      keep: "Leave it",
      async act() {
        await api.redeliver(id, position);
        say("The delivery will be tried again");
        seen.looking.now();
      },
    });
  }

  function askToRedeliver() {
    ask({
      heading: "Redeliver all dead deliveries?",
      body: make("p", {}, "Each delivery that was given up is sent again, with its attempts counted from zero."),
      confirm: "Redeliver all",
      keep: "Leave them",
      async act() {
        const { redelivered } = await api.redeliverDead(id);
        showResult(`${count(redelivered, "delivery", "deliveries")} will be sent again.`, true);
        seen.looking.now();
      },
    });
  }

  function askToRotate() {
    const key = api.newKey(); // so that a retry after a lost answer gets the same secret
    const overlap = make("select", { id: "overlap", name: "overlap" }, OVERLAPS.map(([value, word]) => make("option", { value }, word)));
    askFor({
      heading: "Rotate the secret?",
      body: [
        make("p", {}, "The new secret is shown once. Meanwhile each message is signed with the old one too, so that you can change the receiver’s."),
        make("label.field-line", { for: "overlap" }, make("span", {}, "The old secret stays valid for"), overlap),
      ],
      confirm: "Rotate the secret",
      keep: "Keep the old one",
      async act({ overlap: seconds }) {
        overlap.inert = true; // a retry must ask for the same
        const rotated = await api.rotateSecret(id, Number(seconds), key);
        seen.looking.now();
        return () => showSecret(rotated.secret, "Give it to the receiver. It is never shown again.");
      },
    });
  }

  function askToDelete() {
    ask({
      heading: `Delete webhook ${id}?`,
      body: make("p", {}, "Nothing more is sent to it, and its log is deleted. This can’t be undone."),
      typed: String(id),
      confirm: "Delete the webhook",
      keep: "Keep it",
      async act() {
        await api.deleteWebhook(id);
        say(`Webhook ${id} is deleted`);
        location.hash = "#/webhooks";
      },
    });
  }

  function showMore() {
    wanted = Math.min(MOST, wanted + STEP);
    seen.looking.now();
  }
  return {
    show(parameters) {
      state = parameters.get("state") ?? "";
      wanted = STEP;
      states.show(["", ...STATES].map((each) => [each, each || "all"]), state, (each) => address(`/webhooks/${id}`, { state: each }));
      seen.looking.now();
    },
    stop: seen.stop,
  };
}
