// The tokens that the service accepts: names, roles and limits. The page can't change them; they are lines of a file.

import * as api from "./api.js";
import { make } from "./dom.js";
import { number } from "./format.js";
import { needsToken } from "./session.js";
import { polled, table } from "./views.js";

const ROLES = ["read", "produce", "consume", "admin"];

export function tokensView(main) {
  const tokens = table("Tokens", ["Name", "Roles", "Prefix", "#Requests/s", "#Items/s", "#Bytes/s"], (token) => ({
    attributes: { "data-token": token.name },
    cells: [
      token.name,
      ROLES.filter((role) => token.roles.includes(role)).join(", "),
      token.prefix && make("code", {}, token.prefix),
      token.requests && number(token.requests),
      token.items && number(token.items),
      token.bytes && number(token.bytes),
    ],
  }));
  const hint = make("p.quiet", {}, "Tokens are lines of the service’s file. To add one: ", make("code", {}, "lastbit token new --role read"), ". To remove one, delete its line.");
  const open = make("p.note", { hidden: true }, "This service has no tokens: every caller is an operator.");
  const seen = polled(main, { heading: "Tokens", every: 5000 }, async (signal) => {
    const { tokens: found } = await api.tokens(signal);
    tokens.draw(found);
    tokens.node.hidden = !found.length;
    open.hidden = needsToken();
  });
  main.append(open, tokens.node, hint);
  return seen;
}
