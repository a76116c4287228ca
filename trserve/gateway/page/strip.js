// The scores of an answer's tokens as bars, with the threshold. Knows tokens and a canvas.
//
// Only new bars are drawn; when there is no room left the scale halves and all are drawn again, so
// that an answer of n tokens costs some n bars in all.

import { colours } from "./theme.js";

const LOWEST = 1e-4;
const FIRST_ROOM = 64;

export class Strip {
  constructor(canvas, tokens, threshold) {
    this.canvas = canvas;
    this.tokens = tokens;
    this.threshold = threshold;
    this.room = FIRST_ROOM;
    this.drawn = 0;
    this.width = 0;
  }

  /** Draw what is new. */
  grow() {
    if (!this.width && !this.measure()) return;
    if (this.tokens.length > this.room) {
      while (this.tokens.length > this.room) this.room *= 2;
      this.redraw();
    } else {
      this.bars(this.drawn);
    }
  }

  /** The answer has ended: use the whole width. */
  fit() {
    this.room = Math.max(this.tokens.length, FIRST_ROOM / 2);
    this.redraw();
  }

  /** Which token stands at this place of the page. */
  tokenAt(clientX) {
    const box = this.canvas.getBoundingClientRect();
    const index = Math.floor(((clientX - box.left) / box.width) * this.room);
    return index >= 0 && index < this.tokens.length ? index : null;
  }

  measure() {
    const scale = Math.min(window.devicePixelRatio || 1, 2);
    this.width = Math.round(this.canvas.clientWidth * scale);
    this.height = Math.round(this.canvas.clientHeight * scale);
    this.canvas.width = this.width;
    this.canvas.height = this.height;
    return this.width > 0;
  }

  redraw() {
    if (!this.measure()) return;
    this.drawn = 0;
    this.bars(0);
  }

  /** 0 to 1: of small thresholds the powers of ten, else the value itself. */
  level(score) {
    const share = this.threshold !== null && this.threshold < 0.2 ? 1 - Math.log10(Math.max(score, LOWEST)) / Math.log10(LOWEST) : score;
    return Math.min(Math.max(share, 0.02), 1);
  }

  bars(from) {
    const pen = this.canvas.getContext("2d");
    const paint = colours();
    const step = this.width / this.room;
    const gap = step > 4 ? 1 : 0;
    for (let index = from; index < this.tokens.length; index += 1) {
      const token = this.tokens[index];
      const height = token.score === null ? this.height * 0.3 : this.level(token.score) * (this.height - 6);
      pen.globalAlpha = token.source ? 1 : 0.6;
      pen.fillStyle = paint.models[token.source % paint.models.length];
      pen.fillRect(index * step, this.height - height, Math.max(step - gap, 1), height);
      // The second sign of another model: a cap at the top of its column.
      if (token.source) pen.fillRect(index * step, 0, Math.max(step - gap, 1), 3);
    }
    pen.globalAlpha = 1;
    this.drawn = this.tokens.length;
    if (this.threshold === null) return;
    const y = Math.round(this.height - this.level(this.threshold) * (this.height - 6)) + 0.5;
    pen.strokeStyle = paint.ink;
    pen.setLineDash([6, 4]);
    pen.beginPath();
    pen.moveTo(0, y);
    pen.lineTo(this.width, y);
    pen.stroke();
  }
}
