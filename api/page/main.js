// Chooses the view by the address: #/ is the list, #/batches/7 a batch, #/processes the processes with their instances
// below it. Filters follow a "?".

import { batchView } from "./batch.js";
import { fill, make } from "./dom.js";
import { keepAges } from "./format.js";
import { listView } from "./list.js";
import { instancesView, instanceView, processesView } from "./processes.js";
import { look, signInView, signOut } from "./session.js";

const main = document.getElementById("main");
let view = null;
let signedIn = false;

function route() {
  if (!signedIn) return;
  const hash = location.hash || "#/";
  // A link within the page doesn't change the view.
  if (!hash.startsWith("#/") && view) return;
  const [path, search = ""] = hash.slice(1).split("?", 2);
  const parameters = new URLSearchParams(search);
  const batch = /^\/batches\/(0|[1-9][0-9]{0,15})$/.exec(path);
  const process = processOf(path);
  const name = path === "/" ? "list" : batch ? `batch ${batch[1]}` : process ? path : "nowhere";
  if (view?.name !== name) {
    const first = view === null;
    view?.stop();
    main.replaceChildren();
    view = { name, ...open(name, batch, process) };
    scrollTo(0, 0);
    if (!first) main.focus({ preventScroll: true });
  }
  view.show(parameters);
}

// The names of the process and the instance in a path, if present; null for any other path.
function processOf(path) {
  const parts = /^\/processes(?:\/([^/]+)(?:\/([^/]+))?)?$/.exec(path)?.slice(1);
  if (!parts) return null;
  try {
    const names = parts.filter(Boolean).map(decodeURIComponent);
    return names.some((each) => each === "." || each === "..") ? null : names;
  } catch {
    return null; // a percent sign that escapes nothing
  }
}

function open(name, batch, process) {
  if (name === "list") return listView(main);
  if (batch) return batchView(main, Number(batch[1]));
  if (process?.length === 2) return instanceView(main, ...process);
  if (process?.length === 1) return instancesView(main, ...process);
  if (process) return processesView(main);
  document.title = "Lastbit";
  fill(
    main,
    make("h1", {}, "There is no such page"),
    make("p", {}, "The address may be mistyped. ", make("a", { href: "#/" }, "All batches")),
  );
  return { show() {}, stop() {} };
}

async function start() {
  signedIn = await look();
  if (signedIn) route();
  else askForToken();
}

function askForToken() {
  signedIn = false;
  if (view?.name === "sign in") return;
  view?.stop();
  main.replaceChildren();
  view = {
    name: "sign in",
    ...signInView(main, () => {
      signedIn = true;
      route();
    }),
  };
}

document.getElementById("sign-out").addEventListener("click", async () => {
  await signOut().catch(() => {});
  askForToken();
});
addEventListener("signedout", askForToken);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", route);
keepAges();
start();
