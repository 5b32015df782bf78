// The API calls that the page makes (see openapi.yaml). An error carries the service's explanation.

export class CallFailed extends Error {
  constructor(status, code, detail, problem = {}) {
    super(detail);
    this.status = status;
    this.code = code;
    this.problem = problem;
  }
}

const PATIENCE = 60_000; // milliseconds

async function call(path, { signal, ...options }) {
  // A connection can be lost without a sign. Without a limit, the call would never end, nor would its view be updated.
  const limit = AbortSignal.timeout(PATIENCE);
  let answer;
  let body;
  try {
    answer = await fetch(path, { cache: "no-store", signal: signal ? AbortSignal.any([signal, limit]) : limit, ...options });
    const isJson = /[/+]json/.test(answer.headers.get("content-type") ?? "");
    body = isJson ? await answer.json() : null;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallFailed(0, "unreachable", "The service doesn’t answer. It may be restarting.");
  }
  // The session has ended. In answer to a sign-in, the token is wrong.
  if (answer.status === 401 && path !== "/session") dispatchEvent(new Event("signedout"));
  if (!answer.ok) throw new CallFailed(answer.status, body?.code ?? "", body?.detail ?? answer.statusText, body ?? {});
  return body;
}

const query = (parameters) => {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of [value].flat()) if (each !== null && each !== undefined && each !== "") given.append(name, each);
  }
  const text = given.toString();
  return text && `?${text}`;
};

const get = (path, parameters = {}, signal) => call(path + query(parameters), { signal });
const send = (method, path, body, headers) =>
  call(path, { method, headers: { "Content-Type": "application/json", ...headers }, body: JSON.stringify(body) });
const post = (path, body, headers = {}) => send("POST", path, body, headers);

// An Idempotency-Key. Not crypto.randomUUID, which browsers offer only over TLS.
export const newKey = () => `page-${[...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;

export const session = () => get("/session");
export const signIn = (token) => post("/session", { token });
export const signOut = () => call("/session", { method: "DELETE" });
export const batches = (filter, signal) => get("/v1/batches", filter, signal);
export const counts = (filter, signal) => get("/v1/batches/counts", filter, signal);
export const batch = (id, signal) => get(`/v1/batches/${id}`, {}, signal);
export const update = (id, patch, key) => send("PATCH", `/v1/batches/${id}`, patch, { "Idempotency-Key": key });
export const pending = (id, page, signal) => get(`/v1/batches/${id}/pending`, page, signal);
export const failed = (id, page, signal) => get(`/v1/batches/${id}/failed`, page, signal);
export const reasons = (id, page, signal) => get(`/v1/batches/${id}/failed/reasons`, page, signal);
export const redrive = (id, body, key) => post(`/v1/batches/${id}/redrive`, body, { "Idempotency-Key": key });
export const callback = (id, signal) => get(`/v1/batches/${id}/callback`, {}, signal);
export const picture = (id, start, limit, per, signal) =>
  get(`/v1/batches/${id}/groups`, { start, limit, per }, signal);
export const group = (id, number, signal) => get(`/v1/batches/${id}/groups/${number}`, {}, signal);
export const history = (id, signal) => get(`/v1/batches/${id}/history`, {}, signal);
export const progress = (id, signal) => get(`/v1/batches/${id}/progress`, {}, signal);
export const explain = (id, signal) => get(`/v1/batches/${id}/explain`, {}, signal);
export const deliveries = (id, signal) => get(`/v1/batches/${id}/deliveries`, {}, signal);
export const cancel = (id, body = {}, key = newKey()) => post(`/v1/batches/${id}/cancel`, body, { "Idempotency-Key": key });
export const deleteBatch = (id, state) => call(`/v1/batches/${id}${query({ state })}`, { method: "DELETE" });
export const failures = (filter, signal) => get("/v1/failures", filter, signal);
export const reopen = (id, body, key) => post(`/v1/batches/${id}/reopen`, body, { "Idempotency-Key": key });
export const processes = (signal) => get("/v1/processes", {}, signal);
export const instances = (process, filter, signal) => get(`/v1/processes/${encodeURIComponent(process)}`, filter, signal);
const instancePath = (process, name) => `/v1/processes/${encodeURIComponent(process)}/${encodeURIComponent(name)}`;
export const instance = (process, name, signal) => get(instancePath(process, name), {}, signal);
export const retryParked = (process, name, event) => post(`${instancePath(process, name)}/retry`, { event });
export const redeliver = (webhook, position) => post(`/v1/webhooks/${webhook}/redeliver`, { position });

export const seal = (id) => post(`/v1/batches/${id}/seal`, {});
export const webhooks = (cursor, signal) => get("/v1/webhooks", { limit: 100, cursor }, signal);
export const webhook = (id, signal) => get(`/v1/webhooks/${id}`, {}, signal);
export const createWebhook = (body) => post("/v1/webhooks", body);
export const deleteWebhook = (id) => call(`/v1/webhooks/${id}`, { method: "DELETE" });
export const rotateSecret = (id, overlap, key) =>
  post(`/v1/webhooks/${id}/rotate-secret`, { overlap_seconds: overlap }, { "Idempotency-Key": key });
export const testWebhook = (id) => post(`/v1/webhooks/${id}/test`, {});
export const webhookLog = (id, filter, signal) => get(`/v1/webhooks/${id}/deliveries`, filter, signal);
export const redeliverDead = (id) => post(`/v1/webhooks/${id}/redeliver`, {});
export const groups = (cursor, signal) => get("/v1/consumer-groups", { limit: 1000, cursor }, signal);
export const consumerGroup = (name, signal) => get(`/v1/consumer-groups/${encodeURIComponent(name)}`, {}, signal);
const tallyPath = (tally) => `/v1/tallies/${encodeURIComponent(tally)}`;
export const totals = (tally, filter, signal) => get(tallyPath(tally), filter, signal);
export const total = (tally, key, signal) => get(`${tallyPath(tally)}/${encodeURIComponent(key)}`, {}, signal);
export const tokens = (signal) => get("/session/tokens", {}, signal);
export const sections = (signal) => get("/session/sections", {}, signal);
export const feed = (filter, signal) => get("/v1/events", filter, signal);
export const commands = (filter, signal) => get("/v1/commands", filter, signal);

// All events of a batch that are still in the feed, and whether earlier ones may have been removed.
export async function events(id, signal) {
  const found = [];
  let after = 0;
  let trimmed = false;
  for (;;) {
    try {
      const page = await get("/v1/events", { batch: id, after, limit: 1000 }, signal);
      found.push(...page.events);
      if (page.next >= page.last) return { events: found, trimmed };
      after = page.next;
    } catch (error) {
      if (error.code !== "position_trimmed" || error.problem.trimmed <= after) throw error;
      after = error.problem.trimmed;
      trimmed = true;
    }
  }
}

// The position in the feed up to which all deliveries are planned, without an active webhook none, and the ids of the
// disabled webhooks.
export async function planned(signal) {
  let lowest = Infinity;
  const disabled = [];
  let cursor = null;
  do {
    const page = await get("/v1/webhooks", { limit: 1000, cursor }, signal);
    for (const { id, state, position } of page.webhooks) {
      if (state === "active") lowest = Math.min(lowest, position);
      else disabled.push(id);
    }
    cursor = page.next;
  } while (cursor !== null);
  return { lowest, disabled };
}
