// The session: whether the service requires a token, and what the signed-in token allows. The token is sent once; after
// that a cookie, which scripts can't read, takes its place.

import * as api from "./api.js";
import { make, setText } from "./dom.js";

// The cookie belongs to all tabs: once another one has signed in or out, what this one shows is another session's.
const tabs = new BroadcastChannel("session");
tabs.onmessage = () => location.reload();

const NOBODY = { needed: true, name: null, roles: [], prefix: null };
let who = NOBODY;

// Ask the service.
export async function look() {
  who = await api.session();
  show();
  return !who.needed || who.name !== null;
}

export const may = (role) => !who.needed || who.roles.includes(role) || who.roles.includes("admin");
export const needsToken = () => who.needed;
export const isLimited = () => who.prefix !== null;

function show() {
  const out = document.getElementById("sign-out");
  out.hidden = who.name === null;
  setText(out, `Sign out ${who.name ?? ""}`);
}

export async function signOut() {
  await api.signOut();
  tabs.postMessage(null);
  who = NOBODY;
  show();
}

// The sign-in form. `done` is called once the session may read.
export function signInView(main, done) {
  document.title = "Sign in · Lastbit";
  const token = make("input", { id: "token", type: "password", name: "token", autocomplete: "current-password", required: true });
  const wrong = make("p.note.trouble", { role: "alert", hidden: true });
  const enter = make("button", { type: "submit" }, "Sign in");
  main.append(
    make("h1", {}, "Sign in"),
    make(
      "form.sign-in",
      { onsubmit: submitted },
      make("p.quiet", {}, "This service needs a token with the role read. Its operator can make one with this command:"),
      make("pre", {}, make("code", {}, "lastbit token new --role read")),
      make("label", { for: "token" }, make("span", {}, "Token"), token),
      wrong,
      enter,
    ),
  );
  token.focus();

  async function submitted(event) {
    event.preventDefault();
    enter.disabled = true;
    wrong.hidden = true;
    try {
      who = await api.signIn(token.value);
      tabs.postMessage(null);
      token.value = "";
      if (!may("read")) {
        const roles = `${who.roles.length > 1 ? "roles" : "role"} ${who.roles.join(" and ")}`;
        const refused = `The token ${who.name} has the ${roles}; this page needs read.`;
        await signOut();
        throw new Error(refused);
      }
      show();
      done();
    } catch (error) {
      wrong.hidden = false;
      wrong.textContent = error.message.charAt(0).toUpperCase() + error.message.slice(1);
      enter.disabled = false;
      token.focus();
    }
  }
  return { show() {}, stop() {} };
}
