// What the user prefers, remembered in this browser. After each change there is an event, `preference`, with all of them;
// also when another tab has made the change.

// The first value of each holds until another one is chosen.
export const CHOICES = {
  theme: ["auto", "light", "dark"],
  times: ["ages", "dates"],
  zone: ["local", "UTC"],
  keys: ["on", "off"],
};

const chosen = {};
const placeOf = (name) => `lastbit.${name}`;

function read() {
  for (const [name, values] of Object.entries(CHOICES)) {
    let kept = null;
    try {
      kept = localStorage.getItem(placeOf(name));
    } catch {
      // Without storage, a choice holds until the page is left.
    }
    chosen[name] = values.includes(kept) ? kept : (chosen[name] ?? values[0]);
  }
}

function announce() {
  document.documentElement.dataset.times = chosen.times;
  dispatchEvent(new CustomEvent("preference", { detail: { ...chosen } }));
}

export const preferred = (name) => chosen[name];

export function prefer(name, value) {
  chosen[name] = value;
  try {
    localStorage.setItem(placeOf(name), value);
  } catch {
    // As above.
  }
  announce();
}

addEventListener("storage", () => {
  read();
  announce();
});
read();
document.documentElement.dataset.times = chosen.times;
