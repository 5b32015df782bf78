// The dialog of settings: theme, times, zone, keys. A choice holds at once.

import { showDialog } from "./dialogs.js";
import { make } from "./dom.js";
import { CHOICES, prefer, preferred } from "./preferences.js";

const WORDS = {
  theme: ["Theme", { auto: "as the device", light: "light", dark: "dark" }],
  times: ["Times", { ages: "ages, like 4 min ago", dates: "dates, like 2026-05-04 17:30:00" }],
  zone: ["Time zone", { local: `local (${Intl.DateTimeFormat().resolvedOptions().timeZone})`, UTC: "UTC" }],
  keys: ["Single keys, like /", { on: "on", off: "off" }],
};

function choice(name) {
  const [heading, words] = WORDS[name];
  const option = (value) => {
    const input = make("input", { type: "radio", name, value, checked: preferred(name) === value, onchange: () => prefer(name, value) });
    return make("label.check", {}, input, make("span", {}, words[value]));
  };
  return make("fieldset.choice", {}, make("legend", {}, heading), CHOICES[name].map(option));
}

export function showSettings() {
  const close = make("button", { type: "button", onclick: () => node.close() }, "Close");
  const node = showDialog("Settings", make("div.edit", {}, Object.keys(WORDS).map(choice)), make("p.quiet", {}, "This browser remembers them."), make("div.buttons", {}, close));
}
