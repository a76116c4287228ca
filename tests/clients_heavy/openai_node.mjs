// openai-node against an endpoint: models, whole, streamed, helper, abort, errors.
// Usage: node openai_node.mjs BASE_URL
import assert from 'node:assert/strict';
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'any', maxRetries: 0 });
const asked = {
  model: 'trserve',
  messages: [{ role: 'user', content: 'What is 125 - 54 + 25?' }],
  max_tokens: 80,
  temperature: 0,
};

const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert.deepEqual(models, ['trserve', 'tiny', 'small']);

const { data: whole, response, request_id } = await client.chat.completions
  .create({ ...asked, trserve: { trace: true } }, { headers: { 'X-Request-ID': 'node-1' } })
  .withResponse();
const text = whole.choices[0].message.content;
assert.ok(text);
assert.equal(request_id, 'node-1');
assert.ok(response.headers.get('x-trserve-router'));
assert.equal(whole.choices[0].trserve.source.length, whole.usage.completion_tokens);

let streamed = '';
let usage;
const options = { include_usage: true };
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: options });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? '';
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
assert.ok(usage.trserve.tokens);

const digits = { type: 'integer', minimum: 0, maximum: 999 };
const parameters = {
  type: 'object', properties: { a: digits }, required: ['a'], additionalProperties: false,
};
const called = await client.chat.completions.create({
  ...asked,
  max_tokens: 200,
  tools: [{ type: 'function', function: { name: 'add', parameters } }],
  tool_choice: { type: 'function', function: { name: 'add' } },
});
const call = called.choices[0].message.tool_calls[0].function;
assert.equal(call.name, 'add');
assert.deepEqual(Object.keys(JSON.parse(call.arguments)), ['a']);

const helper = client.chat.completions.stream(asked);
assert.equal((await helper.finalChatCompletion()).choices[0].message.content, text);

const long = await client.chat.completions.create({
  ...asked, max_tokens: 900, ignore_eos: true, stream: true,
});
let seen = 0;
for await (const _ of long) if (++seen === 2) break; // which aborts the request
assert.equal(seen, 2);

await assert.rejects(
  client.chat.completions.create({ ...asked, temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === 'temperature',
);
await assert.rejects(
  client.chat.completions.create({ ...asked, model: 'no-such-model' }), OpenAI.NotFoundError,
);

const completion = await client.completions.create({
  model: 'trserve', prompt: 'Two and two', max_tokens: 8, temperature: 0,
});
assert.ok(completion.choices[0].text);
console.log(`${usage.completion_tokens} tokens, streamed as whole; a call`);
