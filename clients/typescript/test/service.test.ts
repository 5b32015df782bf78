/** Tests with a live service, at the address in LASTBIT_URL. */

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  AckerClosed,
  BatchEnded,
  BatchNotFound,
  BatchSealed,
  Client,
  type Completed,
  type Filters,
  IdempotencyKeyReused,
  InvalidArgument,
  ItemRejected,
  ItemResolved,
  MalformedItem,
  NotRefreshed,
  ServiceError,
  WaitTimeout,
  itemId,
} from "../src/index.js";

assert.ok(process.env["LASTBIT_URL"], "LASTBIT_URL has the address of a service");
const client = new Client();

async function collected<T>(values: AsyncIterable<T>): Promise<T[]> {
  const all: T[] = [];
  for await (const value of values) all.push(value);
  return all;
}

test("open, extend, ack, fail, seal, wait", async () => {
  const batch = await client.open({ key: "flow", labels: { team_name: "search" }, groupSize: 64 });
  assert.equal(batch.state, "open");
  assert.deepEqual(batch.info.labels, { team_name: "search" }); // the user's own names are unchanged
  const ids = await batch.extend(100);
  assert.equal(ids.size, 100);

  const half = await client.ack(ids.slice(0, 50));
  assert.deepEqual([half.applied, half.repeated, half.completed.length], [50, 0, 0]);
  const again = await client.ack([...ids.slice(40, 60)]);
  assert.deepEqual([again.applied, again.repeated], [10, 10]);

  const sealed = await batch.seal();
  assert.equal(sealed.newly, false);
  assert.equal(sealed.pending, 40);
  const [range] = await collected(batch.pending());
  assert.deepEqual([...range!.ids], [...ids.slice(60)]);

  const waiting = batch.wait({ timeout: 30 });
  await client.fail(ids.at(-1)!, "no such product");
  const last = await client.ack(ids.slice(60, -1));
  assert.deepEqual(last.completed, [
    { batch: batch.id, key: "flow", newly: true, succeeded: false, newlySucceeded: false },
  ]);
  const ended = await waiting;
  assert.equal(ended.state, "complete");
  assert.deepEqual([ended.acked, ended.failed, ended.pending, ended.succeeded], [99, 1, 0, false]);
  assert.equal(batch.info, ended);
  const [failed] = await collected(batch.failed());
  assert.deepEqual(failed!.reasons, { [ids.at(-1)!]: "no such product" });

  const redriven = await client.ack(ids.at(-1)!);
  assert.deepEqual(redriven.completed.map((done) => done.newlySucceeded), [true]);
  assert.equal((await batch.refresh()).succeeded, true);
  assert.equal((await batch.verify()).ok, true);
  assert.equal((await batch.watermark()).watermark, 100);
  assert.equal((await batch.explain()).done, true);
  assert.deepEqual((await batch.progress()).batches, { open: 0, sealed: 0, complete: 1, expired: 0, cancelled: 0 });
  assert.equal((await batch.history()).at(-1)!.resolved, 100);
  assert.equal((await batch.repair({ dryRun: true })).after.acked, 100);
});

test("a million ids are acked as bitfields", async () => {
  const batch = await client.open({ items: 1_000_000, sealed: true });
  const result = await client.ack(batch.ids);
  assert.equal(result.applied, 1_000_000);
  assert.deepEqual(result.completed.map((done) => [done.batch, done.newly]), [[batch.id, true]]);
});

test("a completion in an earlier part of a call is still new in the result", async () => {
  const one = await client.open({ items: 1, sealed: true });
  const many = await client.open({ items: 10_000 });
  const result = await client.ack(
    (function* () {
      yield* one.ids;
      yield* many.ids;
      yield* one.ids; // in the second part
    })(),
  );
  assert.deepEqual([result.applied, result.repeated], [10_001, 1]);
  assert.deepEqual(result.completed.map((done) => [done.batch, done.newly, done.newlySucceeded]), [[one.id, true, true]]);
});

test("an idempotency key gives the same batch and the same ids", async () => {
  const idempotencyKey = `typescript-${Date.now()}`;
  const first = await client.open({ items: 10, idempotencyKey });
  const second = await client.open({ items: 10, idempotencyKey });
  assert.deepEqual([first.replayed, second.replayed, second.id], [false, true, first.id]);
  assert.deepEqual([...second.ids], [...first.ids]);
  await assert.rejects(client.open({ items: 11, idempotencyKey }), IdempotencyKeyReused);
  const one = await first.extend(5, { idempotencyKey: "a" });
  assert.deepEqual([...(await first.extend(5, { idempotencyKey: "a" }))], [...one]);
  await first.extend(5, { idempotencyKey: "b", digest: "1" });
  await assert.rejects(first.extend(5, { idempotencyKey: "b", digest: "2" }), IdempotencyKeyReused);
  const item = itemId(first.id, 10);
  await first.seal();
  const added = await first.extend(2, { by: item, idempotencyKey: "links" });
  await client.ack(item);
  assert.deepEqual([...(await first.extend(2, { by: item, idempotencyKey: "links" }))], [...added]);
  await assert.rejects(first.extend(2, { by: item }), ItemResolved);
  assert.equal((await first.refresh()).items, 22);
});

test("a batch is updated", async () => {
  const deadline = new Date("2099-05-04T17:30:00Z");
  const batch = await client.open({ items: 4, labels: { team: "search", trial: "" }, toleratedFailures: 3, deadline });
  await batch.update({ labels: { trial: null, by: "ops" }, toleratedFailures: 1, deadline: null });
  assert.deepEqual(batch.info.labels, { team: "search", by: "ops" });
  assert.deepEqual([batch.info.toleratedFailures, batch.info.deadline], [1, null]);
  await client.fail(batch.ids.slice(0, 1));
  const idempotencyKey = "lower";
  const options = { toleratedFailures: 0, onExceeded: "cancel", idempotencyKey } as const;
  const cancelled = await batch.update(options);
  assert.deepEqual([cancelled.state, cancelled.exceeded], ["cancelled", true]);
  assert.equal((await batch.update(options)).state, "cancelled");
  await assert.rejects(batch.update({ labels: null }), BatchEnded);
});

test("refusals have their own error classes", async () => {
  await assert.rejects(client.batch(9_000_000).refresh(), BatchNotFound);
  const batch = await client.open({ sealed: true });
  assert.equal(batch.newly, true);
  await assert.rejects(batch.extend(1), (error) => error instanceof BatchEnded || error instanceof BatchSealed);
  await assert.rejects(client.open({ groupSize: 63 }), (error) => {
    assert.ok(error instanceof ServiceError && error.code === "invalid_request");
    return error.errors[0]!.place === "body.group_size";
  });
  assert.throws(() => client.batch(1).info, NotRefreshed);
  await assert.rejects(client.ack(["1:0:0", "1:0:00"]), MalformedItem);
  const unknown = await client.ack(`${batch.id}:0:5`);
  assert.deepEqual(unknown.rejected, [{ reason: "unknown_item", item: `${batch.id}:0:5` }]);
  assert.equal(unknown.rejectedCount, 1);
});

test("failed and pending items are asked for again", async () => {
  const batch = await client.open({ items: 6, sealed: true });
  const [slow, broken, ...others] = [...batch.ids];
  await client.fail(slow!, "slow");
  await client.fail(broken!, "broken");
  const idempotencyKey = "redrive";
  const failed = await batch.redrive({ note: "it is fast again", idempotencyKey });
  assert.deepEqual([failed.count, failed.more, [...failed.ranges[0]!.ids]], [2, false, [slow, broken]]);
  assert.equal((await batch.redrive({ note: "it is fast again", idempotencyKey })).position, failed.position);
  assert.deepEqual([...(await batch.redrive({ reason: "broken" })).ranges[0]!.ids], [broken]);
  assert.deepEqual([...(await batch.redrive({ items: [slow!, others[0]!] })).ranges[0]!.ids], [slow]);
  const pending = await batch.redrive({ pending: true });
  assert.deepEqual([pending.count, [...pending.ranges[0]!.ids]], [4, others]);
  const { events } = await client.events({ after: pending.position - 1, batch: batch.id });
  assert.deepEqual([events[0]!.type, (events[0]!.data as { pending: boolean }).pending], ["batch.redrive", true]);
  const isUnderWay = (error: unknown) => error instanceof ServiceError && error.code === "nothing_pending";
  await assert.rejects(batch.redrive({ pending: true, unchangedFor: 3600 }), isUnderWay);
  await client.ack(batch.ids);
  await assert.rejects(batch.redrive({ pending: true }), isUnderWay);
  assert.equal((await batch.refresh()).succeeded, true);
});

test("a batch is cancelled and deleted", async () => {
  const batch = await client.open({ items: 3 });
  const child = await client.open({ items: 1, parent: batch.ids.at(0) });
  const cancelled = await batch.cancel({ reason: "the wrong catalog", children: true });
  assert.deepEqual([cancelled.state, cancelled.reason], ["cancelled", "the wrong catalog"]);
  assert.deepEqual([(await child.refresh()).state, child.info.endedBy], ["cancelled", batch.id]);
  const reopened = await batch.reopen({ deadline: new Date("2099-01-01"), reason: "it was the right one" });
  assert.deepEqual([reopened.state, reopened.reason], ["open", null]);
  await batch.delete();
  await assert.rejects(batch.refresh(), BatchNotFound);
});

test("a wait that takes too long rejects with the batch", async () => {
  const batch = await client.open({ items: 1 });
  const seen: number[] = [];
  const start = performance.now();
  await assert.rejects(
    batch.wait({ timeout: 0.2, onProgress: (state) => seen.push(state.pending) }),
    (error) => error instanceof WaitTimeout && error.batch.pending === 1,
  );
  assert.ok(seen.length >= 1);
  assert.ok(performance.now() - start < 3000);
  const controller = new AbortController();
  const waiting = batch.wait({ signal: controller.signal });
  controller.abort();
  await assert.rejects(waiting, { name: "AbortError" });
});

test("batches are listed page by page", async () => {
  const label = String(Date.now());
  const opened: number[] = [];
  for (let number = 0; number < 5; number += 1) opened.push((await client.open({ labels: { page: label } })).id);
  const listed = await collected(client.batches({ labels: { page: label }, pageSize: 2 }));
  assert.deepEqual(listed.map((batch) => batch.id), opened.reverse());
});

test("batches are found and counted with the same filters", async () => {
  const keyPrefix = `found-${Date.now()}-`;
  const parent = await client.open({ key: `${keyPrefix}0`, items: 1 });
  const child = await client.open({ key: `${keyPrefix}1`, items: 1, sealed: true, parent: parent.ids.at(0)! });
  await client.fail(child.ids);
  const searches: [Filters, number[]][] = [
    [{}, [child.id, parent.id]],
    [{ outcome: "failed" }, [child.id]],
    [{ outcome: "succeeded" }, []],
    [{ parent: parent.id }, [child.id]],
    [{ openedAfter: child.info.createdAt }, [child.id]],
    [{ openedBefore: child.info.createdAt }, [parent.id]],
    [{ openedBefore: new Date(0) }, []],
  ];
  for (const [filters, expected] of searches) {
    const listed = await collected(client.batches({ keyPrefix, ...filters }));
    assert.deepEqual(listed.map((batch) => batch.id), expected);
    assert.equal((await client.counts({ keyPrefix, ...filters })).total, expected.length);
  }
  const counts = await client.counts({ keyPrefix });
  assert.deepEqual(counts, {
    states: { open: 1, sealed: 0, complete: 1, expired: 0, cancelled: 0 },
    total: 2,
    exact: true,
  });
  await assert.rejects(
    client.counts({ key: "a", keyPrefix: "b" }),
    (error) => error instanceof ServiceError && error.code === "invalid_request",
  );
  await assert.rejects(client.counts({ openedAfter: new Date(NaN) }), InvalidArgument);
});

test("the feed has each end once, and can be followed", async () => {
  const batch = await client.open({ items: 1, sealed: true });
  const controller = new AbortController();
  const following = (async () => {
    for await (const event of client.follow({ batch: batch.id, types: ["batch.succeeded"], signal: controller.signal })) {
      return event;
    }
    return undefined;
  })();
  await client.ack(batch.ids);
  const event = await following;
  assert.equal(event?.batch, batch.id);
  const page = await client.events({ batch: batch.id, types: "batch.succeeded" });
  assert.deepEqual(page.events.map(({ id }) => id), [event!.id]);

  const id = `own-${Date.now()}`;
  const [appended] = await client.append([{ id, type: "own.thing", data: { a: [1, null] } }]);
  const [repeated] = await client.append([{ id, type: "own.thing" }]);
  assert.deepEqual([appended!.repeated, repeated!.repeated], [false, true]);
  const own = await client.events({ after: appended!.position - 1, limit: 1 });
  assert.deepEqual(own.events[0]!.data, { a: [1, null] });

  const aborted = client.follow({ after: own.last, signal: controller.signal });
  const next = aborted.next();
  controller.abort();
  await assert.rejects(next, { name: "AbortError" });
});

test("an acker's promises resolve after the commit, with the batch when it is complete", async () => {
  const batch = await client.open({ items: 1000, sealed: true });
  const told: Completed[] = [];
  const acker = client.acker({ onCompleted: async (done) => void told.push(done) });
  const first = await acker.ack(batch.ids.at(0)!);
  assert.equal(first, null);
  assert.equal((await batch.refresh()).acked, 1); // committed before the promise resolved
  const outcomes = await Promise.all([...batch.ids.slice(1)].map((id) => acker.ack(id)));
  assert.equal(outcomes.at(-1)?.batch, batch.id);
  assert.deepEqual(told.map((done) => [done.batch, done.newly, done.succeeded]), [[batch.id, true, true]]);
  await assert.rejects(acker.ack(itemId(batch.id, 1000)), (error) => {
    return error instanceof ItemRejected && error.reason === "unknown_item";
  });
  await assert.rejects(acker.ack("x"), MalformedItem);
  await acker.close();
  await assert.rejects(acker.ack(batch.ids.at(0)!), AckerClosed);
});

test("skipped items are no failures, and an item only moves on", async () => {
  const batch = await client.open({ items: 6, sealed: true, groupSize: 64 });
  const ids = [...batch.ids];
  await client.fail(ids.slice(0, 2), "no picture");
  await client.ack(ids[5]!);
  const skipped = await client.skip(batch.ids.slice(1, 4), "not in the catalog any more");
  assert.deepEqual([skipped.applied, skipped.repeated], [3, 0]);
  const resolved = await client.skip(ids[5]!);
  assert.deepEqual([resolved.applied, resolved.repeated], [0, 1]);
  const acker = client.acker();
  const [, done] = await Promise.all([acker.skip(ids[0]!), acker.skip(ids[4]!, "a duplicate")]);
  await acker.close();
  assert.deepEqual([done?.batch, done?.succeeded], [batch.id, true]);
  const state = await batch.refresh();
  assert.deepEqual([state.acked, state.failed, state.skipped, state.pending, state.succeeded], [1, 0, 5, 0, true]);
  assert.equal((await client.fail(ids[0]!)).repeated, 1);
  assert.equal((await client.ack(ids[3]!)).applied, 1);
  const [range, ...others] = await collected(batch.skipped());
  assert.deepEqual([range!.start, range!.end, range!.first, others.length], [0, 3, ids[0], 1]);
  assert.deepEqual(range!.reasons, {
    [ids[1]!]: "not in the catalog any more",
    [ids[2]!]: "not in the catalog any more",
  });
  assert.deepEqual([...others[0]!.ids], [ids[4]]);
  assert.deepEqual(await collected(batch.failed()), []);
  assert.deepEqual([(await batch.progress()).skipped, (await batch.history()).at(-1)!.resolved], [4, 6]);
  assert.equal((await batch.verify()).ok, true);
});

test("an acker keeps the order of an ack and a failure of one item", async () => {
  const batch = await client.open({ items: 2, sealed: true });
  const acker = client.acker();
  const [id, other] = batch.ids as Iterable<string> as [string, string];
  await Promise.all([acker.fail(id, "first"), acker.ack(id), acker.fail(other, "why")]);
  await acker.close();
  const state = await batch.refresh();
  assert.deepEqual([state.acked, state.failed], [1, 1]);
});

test("an error of onCompleted rejects only the promises of its batch", async () => {
  const broken = await client.open({ items: 2, sealed: true, key: "broken" });
  const fine = await client.open({ items: 1, sealed: true, key: "fine" });
  const reason = new Error("publishing failed");
  const acker = client.acker({
    onCompleted: (done) => {
      if (done.key === "broken") throw reason;
    },
  });
  const outcomes = await Promise.allSettled([...broken.ids, ...fine.ids].map((id) => acker.ack(id)));
  assert.deepEqual(
    outcomes.map((outcome) => (outcome.status === "rejected" ? outcome.reason : outcome.value?.batch)),
    [reason, reason, fine.id],
  );
  await acker.close();
});

test("a signal ends the wait for an ack, but not the ack", async () => {
  const batch = await client.open({ items: 1, sealed: true });
  const acker = client.acker();
  const controller = new AbortController();
  const waiting = acker.ack(batch.ids.at(0)!, { signal: controller.signal });
  controller.abort();
  await assert.rejects(waiting, { name: "AbortError" });
  await acker.close();
  assert.equal((await batch.refresh()).acked, 1);
});
