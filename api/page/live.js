// Staying up to date: transitions come over the event stream at once; acks make no events, so while a batch is live it
// is looked at again and again, as long as somebody sees it, and never more often than the service can answer.

const OWN = ["opened", "sealed", "completed", "succeeded", "expired", "cancelled", "repaired"].map((name) => `type=batch.${name}`);
const BACKOFF = [1000, 2000, 4000, 8000, 15000];

let shown = null;

// What the header says of the stream.
function show(state) {
  const words = { live: "live", connecting: "connecting…", lost: "reconnecting…", paused: "paused" };
  const node = document.getElementById("live");
  if (shown === state) return;
  shown = state;
  node.dataset.state = state;
  node.textContent = words[state];
}

// Follow the feed, of one batch or of all. A browser gives a site six connections, so a hidden tab keeps none.
// `changed` is called at each event, and whenever some may have been missed.
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
      // The browser tries again by itself, unless the service refused.
      if (source.readyState !== EventSource.CLOSED) return;
      // It doesn't say why; a look will.
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
  };
}

// Do `work(signal)` when asked (`now`), and every so often while it answers true and the tab is seen. Never twice at
// once; the pause grows with what a run took. `failed` is told what went wrong; then it is tried again.
export function repeat(work, failed, every = 1200) {
  let timer = 0;
  let running = false;
  let again = false;
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
    again = false;
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
    if (again) timer = setTimeout(run, 50);
    else if (wanted && !document.hidden) timer = setTimeout(run, Math.max(every, 8 * (performance.now() - begun)));
  }
  const turn = () => document.hidden || run();
  document.addEventListener("visibilitychange", turn);
  return {
    now: run,
    stop() {
      stopped = true;
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", turn);
    },
  };
}

// How fast a count moves, from what was seen of it in the last half minute.
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

  // Items a second, or null while it isn't known.
  get rate() {
    if (this.#seen.length < 2) return null;
    const [first, last] = [this.#seen[0], this.#seen.at(-1)];
    const seconds = last[0] - first[0];
    return seconds < 1 ? null : (last[1] - first[1]) / seconds;
  }
}
