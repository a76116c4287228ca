// Which part of a stream's text belongs to which token. Knows no page.
//
// An event may tell of several tokens, one of them may end within a character, and text that could
// be the beginning of a stop string comes later than its token. Tokens and text are therefore two
// queues of bytes, and a token is complete once its bytes are there.

const encoder = new TextEncoder();
const decoder = new TextDecoder();

export class TokenCutter {
  constructor() {
    this.waiting = [];
    this.bytes = new Uint8Array(0);
  }

  /** The tokens of a chunk's choice that are complete now, in their order. */
  add(choice) {
    const text = choice.delta?.content ?? "";
    if (text) this.bytes = joined(this.bytes, encoder.encode(text));
    for (const token of described(choice)) this.waiting.push(token);
    return this.take(choice.finish_reason !== null && choice.finish_reason !== undefined);
  }

  take(isLast) {
    const done = [];
    let at = 0;
    while (this.waiting.length) {
      const { bytes: own, ...token } = this.waiting[0];
      const here = this.bytes.length - at;
      const same = own === null ? 0 : common(own, this.bytes, at);
      const begun = own === null ? here === 0 : same < own.length && same === here;
      if (begun && !isLast) break;
      this.waiting.shift();
      let size = own !== null && (begun || same === own.length) ? same : this.gap(at);
      // A character belongs to the token that began it.
      while (at + size < this.bytes.length && (this.bytes[at + size] & 0xc0) === 0x80) size += 1;
      if (own !== null) this.skip(size - own.length);
      const text = decoder.decode(this.bytes.subarray(at, at + size));
      done.push({ ...token, text, name: token.name ?? text });
      at += size;
    }
    if (isLast && done.length) {
      done[done.length - 1].text += decoder.decode(this.bytes.subarray(at));
      at = this.bytes.length;
    }
    this.bytes = this.bytes.slice(at);
    return done;
  }

  /** How much text there is before the next token's: a token that the text shows in another way. */
  gap(at) {
    const next = this.waiting[0]?.bytes;
    if (!next?.length) return this.bytes.length - at;
    for (let from = at; from < this.bytes.length; from += 1) {
      const same = common(next, this.bytes, from);
      if (same === next.length || from + same === this.bytes.length) return from - at;
    }
    return this.bytes.length - at;
  }

  /** Bytes that a token took beyond its own are those with which the next ones begin. */
  skip(count) {
    for (let index = 0; count > 0 && this.waiting[index]?.bytes; index += 1) {
      const own = this.waiting[index].bytes;
      this.waiting[index] = { ...this.waiting[index], bytes: own.slice(count) };
      count -= own.length;
    }
  }
}

function common(own, bytes, at) {
  let same = 0;
  while (same < own.length && at + same < bytes.length && own[same] === bytes[at + same]) same += 1;
  return same;
}

function joined(one, other) {
  const whole = new Uint8Array(one.length + other.length);
  whole.set(one);
  whole.set(other, one.length);
  return whole;
}

function* described(choice) {
  const trace = choice.trserve ?? {};
  const said = choice.logprobs?.content ?? [];
  const count = Math.max(trace.source?.length ?? 0, said.length);
  for (let index = 0; index < count; index += 1) {
    const logprob = said[index];
    yield {
      bytes: logprob?.bytes ?? null,
      name: logprob?.token,
      source: trace.source?.[index] ?? 0,
      score: trace.score?.[index] ?? null,
      handoffUs: trace.handoff_us?.[index] ?? null,
      alone: trace.alone?.[index] ?? null,
      logprob: logprob?.logprob ?? null,
      tops: (logprob?.top_logprobs ?? []).map((top) => [top.token, top.logprob]),
    };
  }
}
