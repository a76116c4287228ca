// Requests to the server that the page came from, and its streams. Knows no page and no texts.

const STORED = "trserve-key";
const LONGEST_TURN_MS = 12;
let key = "";
try {
  key = sessionStorage.getItem(STORED) ?? "";
} catch {
  key = ""; // storage is switched off: the key is asked for once more after a reload
}

export function hasKey() {
  return key !== "";
}

export function useKey(given) {
  key = given.trim();
  try {
    sessionStorage.setItem(STORED, key);
  } catch {
    return; // it holds until a reload
  }
}

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function problem(response) {
  let message = response.statusText || `HTTP ${response.status}`;
  let code = null;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.detail ?? message;
    code = body.error?.code ?? null;
  } catch {
    code = null; // no JSON: the status says what there is to say
  }
  return new ApiError(response.status, message, code);
}

export function address(path) {
  return new URL(path, document.baseURI).href;
}

export async function getJson(path) {
  const response = await fetch(address(path), { headers: headers(), signal: AbortSignal.timeout(10_000) });
  if (!response.ok) throw await problem(response);
  return response.json();
}

/** What /health says, whatever its status; throws where nobody answers. */
export async function health() {
  const response = await fetch(address("health"), { signal: AbortSignal.timeout(10_000) });
  return response.json();
}

/** The data of each event of a GET, or of a POST of `body`; ends with the stream. */
export async function* events(path, { body, signal } = {}) {
  const asked = body === undefined
    ? { headers: headers(), signal }
    : { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal };
  const response = await fetch(address(path), asked);
  if (!response.ok) throw await problem(response);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let began = performance.now();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        yield line.slice(6);
        // Bytes that have all arrived would be one long task: a key press must get in between.
        if (performance.now() - began > LONGEST_TURN_MS) {
          await new Promise((go) => setTimeout(go, 0));
          began = performance.now();
        }
      }
    }
  } finally {
    reader.cancel().catch(() => undefined); // it has ended already, or the client left
  }
}
