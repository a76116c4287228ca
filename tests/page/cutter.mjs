// The page's cutter of text into tokens, by Node alone: `node cutter.mjs PAGE_FOLDER`.

import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const { TokenCutter } = await import(pathToFileURL(`${process.argv[2]}/tokens.js`));
const encode = (text) => [...new TextEncoder().encode(text)];

/** A chunk of `text` that tells of tokens, each given as text or as bytes. */
function chunk(text, tokens, last = false, sources = tokens.map(() => 0)) {
  const content = tokens.map((each) => (typeof each === "string" ? { token: each, bytes: encode(each) } : { token: "?", bytes: each }));
  return { delta: { content: text }, finish_reason: last ? "stop" : null, logprobs: { content }, trserve: { source: sources } };
}

function texts(...chunks) {
  const cutter = new TokenCutter();
  return chunks.flatMap((each) => cutter.add(each)).map((token) => token.text);
}

assert.deepEqual(texts(chunk("Dan", ["Dan"]), chunk(" has 7", [" has", " ", "7"], true)), ["Dan", " has", " ", "7"]);
// Special tokens are told of and not shown, at the end and in between.
assert.deepEqual(texts(chunk("a", ["a", "<|x|>"]), chunk("b", ["b", "<|im_end|>"], true)), ["a", "", "b", ""]);
// A character of several tokens belongs to the first, whether they come together or not.
const [one, two, three] = encode("안").map((byte) => [byte]);
assert.deepEqual(texts(chunk("안녕", [one, two, three, "녕"], true)), ["안", "", "", "녕"]);
assert.deepEqual(texts(chunk("x안", ["x", [one[0], two[0]], three]), chunk("!", ["!"], true)), ["x", "안", "", "!"]);
// Text that might have begun a stop string comes after its token.
assert.deepEqual(texts(chunk("a", ["a", " stop"]), chunk(" stopped", ["ped"], true)), ["a", " stop", "ped"]);
// What a stop string cut away is missing.
assert.deepEqual(texts(chunk("ab", ["ab", "cd"], true)), ["ab", ""]);
assert.deepEqual(texts(chunk("abc", ["ab", "cd"], true)), ["ab", "c"]);
// A text that is not its tokens' bytes: a space that is left out, bytes that are no character.
assert.deepEqual(texts(chunk("Hi there", [" Hi", " there"], true)), ["Hi", " there"]);
assert.deepEqual(texts(chunk("a\ufffdb", ["a", [0xff], "b"], true)), ["a", "\ufffd", "b"]);
// Without log probabilities the tokens' own texts are not known.
const bare = { delta: { content: "ab" }, finish_reason: null, logprobs: null, trserve: { source: [1, 0] } };
assert.deepEqual(texts(bare, { ...bare, finish_reason: "stop" }).join(""), "abab");
// No text is ever lost or told twice, however it is cut.
const whole = "한국어 text, 🙂 and\nmore";
for (let size = 1; size < 6; size += 1) {
  const bytes = encode(whole);
  const tokens = [];
  for (let at = 0; at < bytes.length; at += size) tokens.push(bytes.slice(at, at + size));
  assert.equal(texts(chunk(whole, tokens, true)).join(""), whole);
  assert.equal(texts(chunk("", tokens.slice(0, 3)), chunk(whole, tokens.slice(3), true)).join(""), whole);
}
console.log("ok");
