// Chooses the view by the address: #/ is the list, #/batches/7 a batch, and so on. Filters follow a "?".

import { batchView } from "./batch.js";
import { groupsView, groupView } from "./consumer-groups.js";
import { showDialog } from "./dialogs.js";
import { fill, make } from "./dom.js";
import { failuresView } from "./failures.js";
import { commandsView, feedView } from "./feed.js";
import { keepTimes } from "./format.js";
import { itemView } from "./item.js";
import { listenForKeys } from "./keys.js";
import { listView } from "./list.js";
import { showSections } from "./nav.js";
import { resumeNotifying } from "./notify.js";
import { trouble } from "./pieces.js";
import { instancesView, instanceView, processesView } from "./processes.js";
import { look, signInView, signOut } from "./session.js";
import { showSettings } from "./settings.js";
import { stuckView } from "./stuck.js";
import { talliesView, tallyView, totalView } from "./tallies.js";
import { tokensView } from "./tokens.js";
import { webhookView } from "./webhook.js";
import { webhooksView } from "./webhooks.js";

const main = document.getElementById("main");
let view = null;
let signedIn = false;

// Each view with the pattern of its path. A parameter in braces is a number, one in brackets an encoded name. The view's
// function gets the page's main element and the parameters.
const VIEWS = [
  ["/", listView],
  ["/batches/{id}", batchView],
  ["/stuck", stuckView],
  ["/failures", failuresView],
  ["/items/[id]", itemView],
  ["/processes", processesView],
  ["/processes/[process]", instancesView],
  ["/processes/[process]/[instance]", instanceView],
  ["/commands", commandsView],
  ["/consumer-groups", groupsView],
  ["/consumer-groups/[group]", groupView],
  ["/tallies", talliesView],
  ["/tallies/[tally]", tallyView],
  ["/tallies/[tally]/[key]", totalView],
  ["/feed", feedView],
  ["/webhooks", webhooksView],
  ["/webhooks/{id}", webhookView],
  ["/tokens", tokensView],
].map(([pattern, open]) => {
  const path = pattern.replace(/\{\w+\}/g, "(?<number>0|[1-9][0-9]{0,15})").replace(/\[\w+\]/g, "([^/]+)");
  return [new RegExp(`^${path}$`), open];
});

function route() {
  if (!signedIn) return;
  const hash = location.hash || "#/";
  // A link within the page doesn't change the view.
  if (!hash.startsWith("#/") && view) return;
  const [path, search = ""] = hash.slice(1).split("?", 2);
  if (view?.path !== path) {
    const first = view === null;
    view?.stop();
    main.replaceChildren();
    showSections(path);
    view = { path, ...open(path) };
    scrollTo(0, 0);
    if (!first) main.focus({ preventScroll: true });
  }
  view.show(new URLSearchParams(search));
}

function open(path) {
  for (const [pattern, openView] of VIEWS) {
    const found = pattern.exec(path);
    const parameters = found && parametersOf(found);
    if (parameters) return openView(main, ...parameters);
  }
  document.title = "Lastbit";
  fill(
    main,
    make("h1", {}, "There is no such page"),
    make("p", {}, "The address may be mistyped. ", make("a", { href: "#/" }, "All batches")),
  );
  return { show() {}, stop() {} };
}

// The parameters in a path, or null if one can't be a name.
function parametersOf(found) {
  if (found.groups) return [Number(found.groups.number)];
  try {
    const names = found.slice(1).map(decodeURIComponent);
    return names.some((each) => each === "." || each === "..") ? null : names;
  } catch {
    return null; // a percent sign that escapes nothing
  }
}

// Until the service has answered, the page doesn't know what the session may do.
async function start() {
  const wrong = trouble();
  main.append(wrong.node);
  for (let pause = 1000; ; pause = Math.min(2 * pause, 15_000)) {
    try {
      signedIn = await look();
      break;
    } catch (error) {
      wrong.show(error);
      await new Promise((over) => setTimeout(over, pause));
    }
  }
  if (signedIn) {
    resumeNotifying();
    route();
  } else askForToken();
}

function askForToken() {
  signedIn = false;
  if (view?.path === null) return;
  view?.stop();
  main.replaceChildren();
  showSections(null);
  view = {
    path: null,
    ...signInView(main, () => {
      signedIn = true;
      route();
    }),
  };
}

document.getElementById("sign-out").addEventListener("click", async () => {
  try {
    await signOut();
    askForToken();
  } catch (error) {
    const close = make("button", { type: "button", onclick: () => dialog.close() }, "Close");
    const dialog = showDialog("You are still signed in", make("p", {}, error.message), make("div.buttons", {}, close));
  }
});
addEventListener("signedout", askForToken);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", route);
document.getElementById("settings").addEventListener("click", showSettings);
keepTimes();
listenForKeys();
start();
