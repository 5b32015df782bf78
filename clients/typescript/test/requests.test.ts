/** Tests with a local server that fails in known ways. */

import assert from "node:assert/strict";
import { type IncomingMessage, type ServerResponse, createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { type TestContext, test } from "node:test";

import {
  BatchEnded,
  BatchNotFound,
  Client,
  type ClientOptions,
  InvalidArgument,
  InvalidRequest,
  LastbitError,
  PositionTrimmed,
  RateLimited,
  ServiceUnreachable,
  Unavailable,
  UnexpectedAnswer,
  itemId,
} from "../src/index.js";

const ANSWER = JSON.stringify({ applied: 1, repeated: 0, completed: [], rejected: [] });
type Handler = (request: IncomingMessage, response: ServerResponse, count: number) => void;

/** A client of a server that answers each request by `handle`, and the received requests. */
async function served(context: TestContext, handle: Handler, options: ClientOptions = {}) {
  const requests: IncomingMessage[] = [];
  const server = createServer((request, response) => {
    requests.push(request);
    request.resume().on("end", () => handle(request, response, requests.length));
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  context.after(() => {
    server.closeAllConnections();
    server.close();
  });
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  return { client: new Client({ url, retry: { base: 0.001 }, ...options }), requests };
}

function problem(response: ServerResponse, status: number, code: string, facts: object = {}, headers = {}): void {
  response.writeHead(status, { "content-type": "application/problem+json", ...headers });
  response.end(JSON.stringify({ type: `urn:lastbit:problem:${code}`, title: "t", status, code, detail: "d", ...facts }));
}

test("a temporary failure is retried with the same idempotency key", async (context) => {
  const { client, requests } = await served(context, (request, response, count) => {
    if (count === 1) return problem(response, 503, "unavailable", {}, { "retry-after": "0" });
    if (count === 2) return void request.socket.destroy();
    if (count === 3) return void response.writeHead(502).end("<html>");
    response.end(ANSWER);
  });
  assert.equal((await client.ack("1:0:0")).applied, 1);
  assert.equal(requests.length, 4);
  const keys = new Set(requests.map((request) => request.headers["idempotency-key"]));
  assert.equal(keys.size, 1);
  assert.match([...keys][0] as string, /^[0-9a-f]{32}$/);
  await client.ack("1:0:0");
  assert.notEqual(requests[4]!.headers["idempotency-key"], [...keys][0]);
});

test("Retry-After is a lower bound of the pause", async (context) => {
  const { client } = await served(context, (_, response, count) =>
    count === 1 ? problem(response, 429, "rate_limited", {}, { "retry-after": "1" }) : void response.end(ANSWER),
  );
  const start = performance.now();
  await client.ack("1:0:0");
  assert.ok(performance.now() - start >= 1000);
});

test("attempts are limited, and the last answer is the error", async (context) => {
  const { client, requests } = await served(
    context,
    (_, response) => problem(response, 503, "unavailable", {}, { "retry-after": "0" }),
    { retry: { base: 0, attempts: 3 } },
  );
  await assert.rejects(client.ack("1:0:0"), (error) => error instanceof Unavailable && error.retryAfter === 0);
  assert.equal(requests.length, 3);
});

test("once a poll was answered, the next ones are retried however many attempts that takes", async (context) => {
  const outage = (count: number) => count > 1 && count < 10;
  const event = { position: 1, id: "e", type: "t", batch: null, key: null, data: null, at: "2026-01-02T03:04:05Z" };
  const options = { retry: { base: 0.001, attempts: 3 } };
  const { client, requests } = await served(
    context,
    (request, response, count) => {
      if (outage(count)) return void request.socket.destroy();
      const events = count === 1 ? [] : [event];
      response.end(JSON.stringify({ events, next: events.length, last: events.length }));
    },
    options,
  );
  for await (const { id } of client.follow({ after: 0 })) {
    assert.equal(id, "e");
    break;
  }
  assert.equal(requests.length, 10);
  const waited = await served(
    context,
    (request, response, count) => {
      if (outage(count)) return void request.socket.destroy();
      response.end(JSON.stringify({ id: 1, state: count === 1 ? "open" : "complete", complete: count > 1 }));
    },
    options,
  );
  assert.equal((await waited.client.batch(1).wait()).state, "complete");
  assert.equal(waited.requests.length, 10);
});

test("a poll that ended before the end of the feed is continued at once", async (context) => {
  const event = { position: 20, id: "e", type: "t", batch: null, key: null, data: null, at: "2026-01-02T03:04:05Z" };
  const { client, requests } = await served(context, (_, response, count) => {
    response.end(JSON.stringify({ events: count === 20 ? [event] : [], next: count, last: 20 }));
  });
  const start = performance.now();
  for await (const { id } of client.follow({ after: 0, types: "t" })) {
    assert.equal(id, "e");
    break;
  }
  assert.equal(requests.length, 20);
  assert.ok(performance.now() - start < 15_000); // with pauses it takes 19 seconds
});

test("a wait beyond the deadline is not started", async (context) => {
  const { client, requests } = await served(context, (_, response) =>
    problem(response, 429, "rate_limited", {}, { "retry-after": "3600" }),
  );
  await assert.rejects(client.ack("1:0:0"), (error) => error instanceof RateLimited && error.retryAfter === 3600);
  assert.equal(requests.length, 1);
});

test("a refusal is not retried, and has the class of its code", async (context) => {
  const { client, requests } = await served(context, (request, response) => {
    if (request.url === "/v1/batches/1") return problem(response, 404, "batch_not_found");
    if (request.url === "/v1/batches/1/seal") return problem(response, 409, "batch_expired");
    if (request.url?.startsWith("/v1/events")) return problem(response, 410, "position_trimmed", { trimmed: 9 });
    problem(response, 422, "a_newer_code", { errors: [{ place: "body.items[0]", expected: "an id" }] });
  });
  await assert.rejects(client.batch(1).refresh(), BatchNotFound);
  await assert.rejects(client.batch(1).seal(), (error) => error instanceof BatchEnded && error.code === "batch_expired");
  await assert.rejects(client.events({ after: 1 }), (error) => {
    assert.ok(error instanceof PositionTrimmed && error.problem?.code === "position_trimmed");
    return error.problem.trimmed === 9; // the code selects the problem's type
  });
  await assert.rejects(client.ack("1:0:0"), (error) => {
    assert.ok(error instanceof InvalidRequest && error instanceof LastbitError);
    assert.equal(error.name, "InvalidRequest");
    assert.deepEqual(error.errors, [{ place: "body.items[0]", expected: "an id" }]);
    return error.code === "a_newer_code" && error.status === 422 && /d \(422 a_newer_code\)/.test(error.message);
  });
  assert.equal(requests.length, 4);
});

test("a delete whose answer was lost has succeeded", async (context) => {
  const { client } = await served(context, (request, response, count) =>
    count === 1 ? void request.socket.destroy() : problem(response, 404, "batch_not_found"),
  );
  await client.batch(1).delete();
});

test("other software at the address is detected", async (context) => {
  const { client } = await served(context, (request, response) => {
    if (request.method === "POST") return void response.end("<html>");
    if (request.url === "/v1/batches/3") return void response.end("[]");
    response.writeHead(302, { location: "/elsewhere" }).end();
  });
  await assert.rejects(client.ack("1:0:0"), UnexpectedAnswer);
  await assert.rejects(client.batch(2).refresh(), UnexpectedAnswer);
  await assert.rejects(client.batch(3).refresh(), UnexpectedAnswer);
});

test("an address without a listener is named", async (context) => {
  const { client } = await served(context, () => undefined, { url: "http://127.0.0.1:9", retry: { attempts: 2, base: 0 } });
  await assert.rejects(client.ack("1:0:0"), (error) => {
    assert.ok(error instanceof ServiceUnreachable);
    assert.match(error.message, /^http:\/\/127\.0\.0\.1:9 did not answer POST \/v1\/acks: .+ \(2 attempts in /);
    return error.attempts === 2;
  });
});

test("a call to a silent server ends after the timeout", async (context) => {
  const { client, requests } = await served(context, () => undefined, { timeout: 0.05, retry: { attempts: 2, base: 0 } });
  await assert.rejects(client.ack("1:0:0"), /nothing came within 0.05 s/);
  assert.equal(requests.length, 2);
});

test("a signal ends a request and a pause at once, with its own reason", async (context) => {
  const reason = new Error("enough");
  const controller = new AbortController();
  const { client } = await served(context, () => controller.abort(reason));
  await assert.rejects(client.ack("1:0:0", { signal: controller.signal }), reason);

  const second = new AbortController();
  const pausing = await served(context, (_, response) => {
    problem(response, 503, "unavailable", {}, { "retry-after": "30" });
    setTimeout(() => second.abort(reason), 20);
  });
  await assert.rejects(pausing.client.batch(1).wait({ signal: second.signal }), reason);

  const before = await served(context, (_, response) => void response.end(ANSWER));
  await assert.rejects(before.client.ack("1:0:0", { signal: AbortSignal.abort(reason) }), reason);
  assert.equal(before.requests.length, 0);
});

test("a call names its batch for proxies, the first of several", async (context) => {
  const { client, requests } = await served(context, (_, response) => problem(response, 422, "invalid_request"));
  const calls: [Promise<unknown>, string | undefined][] = [
    [client.batch(7).refresh(), "7"],
    [client.ack(["7:0:1", "8:0:1"]), "7"],
    [client.open({ items: 1, parent: "7:0:1" }), "7"],
    [client.open({ items: 1 }), undefined],
  ];
  for (const [call] of calls) await assert.rejects(call);
  const named = requests.map((request) => request.headers["lastbit-batch"] ?? "none").sort();
  assert.deepEqual(named, calls.map(([, batch]) => batch ?? "none").sort());
});

test("a token is sent, and invalid options are refused", async (context) => {
  const { client, requests } = await served(context, (_, response) => void response.end(ANSWER), { token: "lastbit_x" });
  await client.ack("1:0:0");
  assert.equal(requests[0]!.headers.authorization, "Bearer lastbit_x");
  for (const url of ["127.0.0.1:8000", "ftp://x", "http://x/?a=b", "", "http://me:secret@x"]) {
    assert.throws(() => new Client({ url: url || " " }), InvalidArgument, url);
  }
  assert.throws(() => new Client({ token: "a b" }), InvalidArgument);
  assert.throws(() => new Client({ timeout: 0 }), InvalidArgument);
  assert.throws(() => client.batch(-1), InvalidArgument);
  await assert.rejects(client.batch(1).extend(1, { idempotencyKey: "a b" }), InvalidArgument);
});

test("an argument that JSON can't represent is refused", async (context) => {
  const { client, requests } = await served(context, (_, response) => void response.end(ANSWER));
  const data: Record<string, unknown> = { order: 2n ** 60n };
  await assert.rejects(client.append([{ id: "e", type: "t", data }]), (error) => {
    return error instanceof InvalidArgument && /JSON.*BigInt/.test(error.message) && error.cause instanceof TypeError;
  });
  data["order"] = data;
  await assert.rejects(client.append([{ id: "e", type: "t", data }]), InvalidArgument);
  assert.equal(requests.length, 0);
});

test("the results before a failure are in the error", async (context) => {
  const { client } = await served(context, (_, response, count) =>
    count === 1 ? void response.end(ANSWER) : problem(response, 413, "too_large"),
  );
  const ids = Array.from({ length: 20_000 }, (_, number) => itemId(1, number));
  await assert.rejects(client.ack(ids), (error) => error instanceof LastbitError && error.partial?.applied === 1);
});

test("an acker has one call under way and sends the rest together", async (context) => {
  const waiting: ServerResponse[] = [];
  const { client, requests } = await served(context, (_, response) => {
    waiting.push(response);
    if (requests.length > 1) for (const one of waiting.splice(0)) one.end(ANSWER);
  });
  const acker = client.acker();
  const first = acker.ack("1:0:0");
  while (waiting.length === 0) await new Promise((resolve) => setImmediate(resolve));
  const others = Array.from({ length: 1000 }, (_, number) => acker.ack(itemId(1, number + 1)));
  waiting.splice(0)[0]!.end(ANSWER);
  assert.deepEqual(await Promise.all([first, ...others]), Array(1001).fill(null));
  assert.equal(requests.length, 2);
  await acker.close();
});

test("an acker sends an item's failure and its ack in their order", async (context) => {
  const { client, requests } = await served(context, (_, response) => void response.end(ANSWER));
  const acker = client.acker();
  const given = [acker.ack("1:0:0"), acker.fail("1:0:1", "why"), acker.ack("1:0:1"), acker.ack("1:0:2")];
  await Promise.all(given);
  assert.deepEqual(requests.map((request) => request.url), ["/v1/acks", "/v1/failures", "/v1/acks"]);
  await acker.close();
});

test("all promises of a failed call reject", async (context) => {
  const { client } = await served(context, (_, response) => problem(response, 403, "forbidden"));
  const acker = client.acker();
  const outcomes = await Promise.allSettled([acker.ack("1:0:0"), acker.ack("1:0:0"), acker.fail("1:0:1", "why")]);
  assert.deepEqual(outcomes.map((outcome) => outcome.status), ["rejected", "rejected", "rejected"]);
  await acker.close();
});

test("an acker's room waits while too many promises are open", async (context) => {
  const { client } = await served(context, (_, response) => void response.end(ANSWER));
  const acker = client.acker({ maxPending: 2 });
  let settled = 0;
  for (let number = 0; number < 10; number += 1) {
    await acker.room();
    assert.ok(number - settled <= 2);
    void acker.ack(itemId(1, number)).then(() => (settled += 1));
  }
  await acker.close();
  assert.equal(settled, 10);
});
