// One answer on the page: its tokens, their strip and what is known of it as a whole.
//
// Tokens are appended once in each frame of the screen and never touched again. Laying out and
// painting a line of text costs what there is of it already, however: frames are left out so that
// the page is busy with them for half of the time at most, and a long text is cut into blocks at line
// ends. Knows no requests.

import { number, percent, short, t } from "./catalogue.js";
import { make, terms } from "./dom.js";
import { Strip } from "./strip.js";

const MOST_PER_FRAME = 300;
const BLOCK_TOKENS = 150;
const STRIP_EVERY_MS = 120;
const SAY_EVERY_MS = 3000;
const HOVER_MS = 120;
const SENTENCE_END = /[.!?。\n](?=\s|$)/g;

const growing = new Set();
let isAsked = false;
let nextAt = 0;
let drawnFrom = 0;
const afterFrame = new MessageChannel();
// A message that is sent in a frame arrives once the frame is laid out and painted.
afterFrame.port1.onmessage = () => {
  const now = performance.now();
  nextAt = now + (now - drawnFrom);
};

function askFrame() {
  if (isAsked || !growing.size) return;
  isAsked = true;
  requestAnimationFrame(grow);
}

function grow() {
  isAsked = false;
  if (performance.now() >= nextAt) {
    drawnFrom = performance.now();
    for (const answer of growing) answer.grow();
    afterFrame.port2.postMessage(null);
  }
  askFrame();
}

export class Answer {
  /**
   * @param who says what the answer is called, in the language of now.
   * @param threshold `{name, value}` of the router's first parameter, or null.
   * @param tools `choose(answer, index)`, `peek(answer, index)`, `grown()`, `say(text)`.
   */
  constructor(models, who, threshold, tools) {
    this.models = models;
    this.who = who;
    this.threshold = threshold;
    this.tools = tools;
    this.tokens = [];
    this.shown = 0;
    this.now = null;
    this.ended = false;
    this.unsaid = "";
    this.saidAt = performance.now();
    this.stripAt = 0;
    this.text = make("div", { className: "answer still", tabIndex: 0, role: "group" });
    this.canvas = make("canvas", { className: "strip", role: "img" });
    this.facts = make("div");
    this.note = make("p", { className: "answer-note", hidden: true });
    this.inspect = make("button", { type: "button", className: "quiet", hidden: true });
    this.inspect.addEventListener("click", () => this.choose(this.now ?? 0));
    this.title = make("h3");
    this.element = make("div", { className: "column" }, this.title, this.text, this.canvas, this.facts, this.note, this.inspect);
    this.newBlock();
    this.strip = new Strip(this.canvas, this.tokens, threshold?.value ?? null);
    this.words();
    this.text.addEventListener("click", (event) => event.target.n !== undefined && this.choose(event.target.n));
    this.text.addEventListener("keydown", (event) => this.key(event));
    this.text.addEventListener("mouseover", (event) => this.hover(event.target.n));
    this.text.addEventListener("mouseleave", () => this.hover(undefined));
    this.canvas.addEventListener("click", (event) => {
      const index = this.strip.tokenAt(event.clientX);
      if (index !== null && index < this.shown) this.choose(index);
    });
  }

  /** The texts, in the language of now. */
  words() {
    this.title.textContent = this.who();
    this.text.setAttribute("aria-label", t("answerLabel", { who: this.who() }));
    this.inspect.textContent = t("inspect");
    const over = this.tokens.filter((token) => token.source).length;
    this.canvas.setAttribute("aria-label", t("stripLabel", { n: this.tokens.length, threshold: this.threshold ? short(this.threshold.value) : "-", over, model: this.models[0] }));
    if (this.summary) this.facts.replaceChildren(this.factList());
  }

  add(tokens) {
    this.tokens.push(...tokens);
    for (const token of tokens) this.unsaid += token.text;
    growing.add(this);
    askFrame();
  }

  grow() {
    const upto = Math.min(this.tokens.length, this.shown + MOST_PER_FRAME);
    if (upto > this.shown) {
      let fresh = document.createDocumentFragment();
      for (; this.shown < upto; this.shown += 1) {
        fresh.append(this.span(this.shown));
        this.inBlock += 1;
        if (this.inBlock < BLOCK_TOKENS || !this.tokens[this.shown].text.endsWith("\n")) continue;
        this.block.append(fresh);
        fresh = document.createDocumentFragment();
        this.newBlock();
      }
      this.block.append(fresh);
      this.tools.grown();
    }
    const now = performance.now();
    if (now - this.stripAt > STRIP_EVERY_MS) {
      this.stripAt = now;
      this.strip.grow();
    }
    if (now - this.saidAt > SAY_EVERY_MS) this.say();
    if (this.shown === this.tokens.length) this.rest();
  }

  rest() {
    if (this.tokens.length === this.strip.drawn || this.ended) growing.delete(this);
    if (this.ended) this.settle();
  }

  newBlock() {
    this.block = make("div");
    this.inBlock = 0;
    this.text.append(this.block);
  }

  span(index) {
    const token = this.tokens[index];
    const span = document.createElement("span");
    span.className = `t m${token.source % 5}`;
    span.n = index;
    span.textContent = token.text;
    token.span = span;
    return span;
  }

  /** Whole sentences for a screen reader, now and then: never a token at a time. */
  say() {
    let end = 0;
    for (const found of this.unsaid.matchAll(SENTENCE_END)) end = found.index + 1;
    if (!end) return;
    this.saidAt = performance.now();
    this.tools.say(this.unsaid.slice(0, end));
    this.unsaid = this.unsaid.slice(end);
  }

  /** No more tokens come. `summary`: see factList; `note`: a sentence, or null; is it a `failure`? */
  end(summary, note, failure) {
    this.summary = summary;
    this.ended = true;
    this.note.hidden = !note;
    this.note.textContent = note ?? "";
    this.note.className = failure ? "answer-note answer-error" : "answer-note";
    this.text.classList.remove("still");
    growing.add(this);
    askFrame();
  }

  settle() {
    this.strip.fit();
    this.inspect.hidden = this.canvas.hidden = this.facts.hidden = !this.tokens.length;
    this.words();
    this.tools.grown();
    if (!this.tokens.length) return;
    const { tokens, time } = this.summary;
    this.tools.say(`${this.unsaid} ${t("finished", { n: this.tokens.length, parts: counted(tokens), time: number(time / 1000, 1) })}`);
    this.unsaid = "";
  }

  factList() {
    const { tokens, share, cost, time, first, handoffs } = this.summary;
    const count = this.tokens.length;
    const pairs = [[t("tokens"), counted(tokens)], [t("share"), percent(share)]];
    if (cost !== null) pairs.push([t("cost"), number(cost, 3)]);
    pairs.push([t("time"), `${number(time / 1000, 2)} s`]);
    if (first !== null) pairs.push([t("first"), `${number(first, 0)} ms`]);
    if (first !== null && count > 1) pairs.push([t("speed"), number((1000 * (count - 1)) / Math.max(time - first, 1), 0)]);
    if (handoffs !== null) pairs.push([t("handoffs"), number(handoffs)]);
    return terms(pairs, { className: "facts" });
  }

  key(event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const last = this.shown - 1;
    if (last < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
    let to = null;
    if (event.key in moves) to = this.now === null ? 0 : this.now + moves[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = last;
    else if (event.key === "Enter" || event.key === " ") to = this.now ?? 0;
    if (to === null) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(to, 0), last), { focusCard: event.key === "Enter" });
  }

  /** Over a token the pointer opens its card for as long as it stays, unless one was chosen. */
  hover(index) {
    clearTimeout(this.hovering);
    this.hovering = setTimeout(() => this.tools.peek(this, index), HOVER_MS);
  }

  /** Show this token's card. */
  choose(index, options = {}) {
    this.mark(index);
    this.tools.choose(this, index, options);
  }

  mark(index) {
    if (this.now !== null) this.tokens[this.now].span.classList.remove("now");
    this.now = index;
    if (index !== null) this.tokens[index].span.classList.add("now");
  }
}

export function counted(tokens) {
  return Object.entries(tokens)
    .map(([model, n]) => t("tokensBy", { model, n: number(n) }))
    .join(", ");
}
