// The page's texts: the same keys and places in every language, and each of them used.

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { pathToFileURL } from "node:url";

const folder = process.argv[2];
const { TEXTS } = await import(pathToFileURL(`${folder}/catalogue.js`));
const { en, ...others } = TEXTS;
const places = (text) => (text.match(/\{\w+\}/g) ?? []).sort();
const files = readdirSync(folder).map((name) => readFileSync(`${folder}/${name}`, "utf8"));
const whole = files.join("\n");

assert.ok(Object.keys(others).length > 0);
for (const [language, texts] of Object.entries(others)) {
  assert.deepEqual(Object.keys(texts), Object.keys(en), language);
  for (const [key, text] of Object.entries(texts)) assert.deepEqual(places(text), places(en[key]), `${language} ${key}`);
}
for (const key of Object.keys(en)) assert.match(whole, new RegExp(`["']${key}["']`), `nobody says ${key}`);
for (const [, key] of whole.matchAll(/(?:\bt\(|data-t=)"(\w+)"/g)) assert.ok(key in en, `there is no ${key}`);
console.log("ok");
