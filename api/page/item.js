// The address of an item by its id, #/items/7:0:3, which leads to the item among the bits of its group.

import { make } from "./dom.js";

export const ITEM = /^(0|[1-9][0-9]{0,15}):(0|[1-9][0-9]{0,14}):(0|[1-9][0-9]{0,4})$/;

export const itemAddress = (id) => {
  const [, batch, group, index] = ITEM.exec(id);
  return `#/batches/${batch}?group=${group}&item=${index}`;
};

export function itemView(main, id) {
  if (ITEM.test(id)) location.replace(itemAddress(id));
  else main.append(make("h1", {}, "This is not an item"), make("p", {}, "An item’s id has three numbers: batch, group and index, as in 7:0:3. ", make("a", { href: "#/" }, "All batches")));
  return { show() {}, stop() {} };
}
