// Keeps the page current. State changes arrive over the event stream. Acks make no events, so a live batch is polled
// while its tab is visible, at a rate that follows the service's response time.

const OWN = ["opened", "updated", "sealed", "completed", "succeeded", "expired", "cancelled", "repaired", "failures_exceeded"].map((name) => `type=batch.${name}`);
const BACKOFF = [1000, 2000, 4000, 8000, 15000];

let shown = null;

// The stream's state in the page's header.
function show(state) {
  const words = { none: "", live: "live", connecting: "connecting…", lost: "reconnecting…", paused: "paused" };
  const node = document.getElementById("live");
  if (shown === state) return;
  shown = state;
  node.dataset.state = state;
  node.textContent = words[state];
}

// Follow the feed of one batch or of all. A browser allows a site six connections, so a hidden tab closes its own.
// `changed` is called for each event, and whenever events may have been missed.
export function follow(batch, changed) {
  const address = `/v1/events/stream?${batch === null ? OWN.join("&") : `batch=${batch}`}`;
  let source = null;
  let timer = 0;
  let failures = 0;
  let opened = false;

  function open() {
    source = new EventSource(address);
    source.onopen = () => {
      failures = 0;
      show("live");
      if (opened) changed();
      opened = true;
    };
    source.onmessage = (message) => changed(JSON.parse(message.data));
    source.onerror = () => {
      show("lost");
      // The browser reconnects by itself, unless the service refused.
      if (source.readyState !== EventSource.CLOSED) return;
      // The stream gives no reason; an ordinary request will.
      changed();
      clearTimeout(timer);
      timer = setTimeout(open, BACKOFF[Math.min(failures++, BACKOFF.length - 1)]);
    };
  }
  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }
  function turn() {
    if (document.hidden) {
      close();
      show("paused");
    } else if (source === null) {
      show("connecting");
      open();
    }
  }
  document.addEventListener("visibilitychange", turn);
  turn();
  return () => {
    document.removeEventListener("visibilitychange", turn);
    close();
    show("none");
  };
}

// Run `work(signal)` on request, and repeatedly while it returns true and the tab is visible. Runs never overlap, and the
// pause grows with the duration of a run. `now` is for the user's actions and skips the pause. `soon` is for events, of
// which there may be many, and keeps it. After an error, `failed` gets it and `work` runs again.
export function repeat(work, failed, every = 1200) {
  let timer = 0;
  let running = false;
  let again = false; // `now` was called during a run
  let noticed = false; // `soon` was called since the last run began
  let rested = 0; // when the pause after the last run ends
  let wanted = true;
  let stopped = false;
  const abort = new AbortController();

  async function run() {
    clearTimeout(timer);
    if (stopped) return;
    if (running) {
      again = true;
      return;
    }
    running = true;
    again = noticed = false;
    const begun = performance.now();
    try {
      wanted = await work(abort.signal);
    } catch (error) {
      if (stopped) return;
      failed(error);
      wanted = true;
    } finally {
      running = false;
    }
    if (stopped) return;
    const pause = Math.max(50, 8 * (performance.now() - begun));
    rested = performance.now() + pause;
    if (again) timer = setTimeout(run, 50);
    else if (noticed) timer = setTimeout(run, pause);
    else if (wanted && !document.hidden) timer = setTimeout(run, Math.max(every, pause));
  }
  function soon() {
    if (!running && !again && !noticed && !stopped) {
      clearTimeout(timer);
      timer = setTimeout(run, rested - performance.now());
    }
    noticed = true;
  }
  const turn = () => document.hidden || run();
  document.addEventListener("visibilitychange", turn);
  return {
    now: run,
    soon,
    stop() {
      stopped = true;
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", turn);
    },
  };
}

// How fast a count grows, from its values of the last half minute.
export class Pace {
  #seen = [];

  saw(resolved) {
    const now = performance.now() / 1000;
    this.#seen.push([now, resolved]);
    while (this.#seen.length > 2 && this.#seen[1][0] < now - 30) this.#seen.shift();
  }

  forget() {
    this.#seen = [];
  }

  // Items per second, or null while unknown.
  get rate() {
    if (this.#seen.length < 2) return null;
    const [first, last] = [this.#seen[0], this.#seen.at(-1)];
    const seconds = last[0] - first[0];
    return seconds < 1 ? null : (last[1] - first[1]) / seconds;
  }
}
