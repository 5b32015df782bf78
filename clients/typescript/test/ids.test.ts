import assert from "node:assert/strict";
import { test } from "node:test";

import { InvalidArgument, ItemIds, MalformedItem, itemId, parseItemId } from "../src/index.js";
import { masks, pieces } from "../src/masks.js";

test("a billion ids take no memory", () => {
  const before = process.memoryUsage().heapUsed;
  const ids = new ItemIds(7, 8192, 5, 1_000_000_000);
  assert.equal(ids.size, 1_000_000_000);
  assert.equal(ids.at(0), "7:0:5");
  assert.equal(ids.at(8187), "7:1:0");
  assert.equal(ids.at(-1), itemId(7, 1_000_000_004));
  assert.equal(ids.at(1_000_000_000), undefined);
  assert.equal(ids.at(-1_000_000_001), undefined);
  assert.equal(ids.indexOf("7:1:0"), 8187);
  const [first, second] = ids;
  assert.deepEqual([first, second], ["7:0:5", "7:0:6"]);
  assert.ok(process.memoryUsage().heapUsed - before < 10_000_000);
});

test("ids can be iterated across groups, any number of times", () => {
  const ids = new ItemIds(3, 64, 62, 70);
  const expected = Array.from({ length: 70 }, (_, position) => itemId(3, 62 + position, 64));
  assert.deepEqual([...ids], expected);
  assert.deepEqual(Array.from(ids), expected);
  assert.deepEqual(expected.slice(0, 4), ["3:0:62", "3:0:63", "3:1:0", "3:1:1"]);
  for (const [position, id] of expected.entries()) {
    assert.equal(ids.at(position), id);
    assert.equal(ids.indexOf(id), position);
  }
});

test("slices equal those of an array", () => {
  const ids = new ItemIds(3, 64, 62, 10);
  const all = [...ids];
  for (const bounds of [[], [3], [2, 5], [-4], [-4, -1], [5, 2], [0, 99], [-99, 3], [10]] as [number?, number?][]) {
    assert.deepEqual([...ids.slice(...bounds)], all.slice(...bounds), String(bounds));
  }
});

test("an id of another batch or range has no position", () => {
  const ids = new ItemIds(3, 64, 62, 10);
  for (const other of ["3:0:61", "3:1:8", "4:0:62", "3:0:64", "03:0:62", "3:0:62 ", "", "3:0"]) {
    assert.equal(ids.indexOf(other), -1, other);
    assert.ok(!ids.has(other));
  }
});

test("an id has one spelling", () => {
  assert.deepEqual(parseItemId("7:0:42"), { batch: 7, group: 0, index: 42 });
  assert.equal(parseItemId("9007199254740991:0:0")?.batch, Number.MAX_SAFE_INTEGER);
  for (const text of ["07:0:42", "+7:0:42", "7:0:42\n", " 7:0:42", "7:0", "7:0:0:0", "9007199254740992:0:0", 7, null]) {
    assert.equal(parseItemId(text), undefined, String(text));
  }
});

test("numbers that can't be ids are refused", () => {
  assert.throws(() => new ItemIds(1, 0, 0, 1), InvalidArgument);
  assert.throws(() => new ItemIds(1, 64, -1, 1), InvalidArgument);
  assert.throws(() => new ItemIds(1, 64, 0, 0.5), InvalidArgument);
  assert.throws(() => new ItemIds(1, 64, Number.MAX_SAFE_INTEGER, 9), InvalidArgument);
});

test("masks have exactly the bits of their ids", () => {
  for (const [start, size] of [[0, 1], [0, 64], [5, 3], [7, 2], [63, 2], [8, 56], [1, 200], [64, 64], [60, 0]] as const) {
    const ids = new ItemIds(9, 64, start, size);
    const found: string[] = [];
    for (const { batch, group, bits } of masks(ids)) {
      const bytes = Buffer.from(bits, "base64");
      assert.notEqual(bytes.at(-1), 0);
      for (let index = 0; index < bytes.length * 8; index += 1) {
        if ((bytes[index >> 3]! >> (index & 7)) & 1) found.push(`${batch}:${group}:${index}`);
      }
    }
    assert.deepEqual(found, [...ids]);
  }
});

test("pieces fit one request each", () => {
  const long = [...pieces(new ItemIds(9, 64, 0, 64 * 4096 + 1))];
  assert.deepEqual(long.map((piece) => ("groups" in piece ? piece.groups.length : 0)), [4096, 1]);
  const wide = [...pieces(new ItemIds(9, 32768, 0, 32768 * 4096))];
  assert.ok(wide.length > 1);
  for (const piece of wide) assert.ok(JSON.stringify(piece).length < 8 * 2 ** 20);
  const texts = Array.from({ length: 25_000 }, (_, number) => itemId(1, number));
  const listed = [...pieces([...texts, texts[0]!])];
  assert.deepEqual(listed.map((piece) => ("items" in piece ? piece.items.length : 0)), [10_000, 10_000, 5_000]);
  assert.deepEqual([...pieces("1:0:0")], [{ items: ["1:0:0"] }]);
  assert.deepEqual([...pieces([])], []);
});

test("a malformed id is named with its position, before anything is sent", () => {
  for (const ids of [["1:0:0", "1:0:x"], new Set(["1:0:0", "1:0:x"])]) {
    assert.throws(() => pieces(ids), (error) => error instanceof MalformedItem && error.position === 1);
  }
  assert.throws(() => pieces(7 as unknown as string), MalformedItem);
});
