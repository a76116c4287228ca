// A request as a command line and as a program. Knows no page; a key is never in it.

function shellQuoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export function asCurl(base, body, withKey) {
  const key = withKey ? ' \\\n  -H "Authorization: Bearer $TRSERVE_API_KEY"' : "";
  return `curl -N ${base}v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${shellQuoted(JSON.stringify(body))}\n`;
}

function python(value, indent = "") {
  const inner = `${indent}    `;
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map((each) => python(each, indent)).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  const members = Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${python(each, inner)},\n`);
  return `{\n${members.join("")}${indent}}`;
}

const OPENAI = ["model", "messages", "stream", "stream_options", "temperature", "max_tokens", "seed", "logprobs", "top_logprobs"];

export function asPython(base, body, withKey) {
  const key = withKey ? 'os.environ["TRSERVE_API_KEY"]' : '"unused"';
  const own = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.includes(name)));
  const lines = OPENAI.filter((name) => name in body).map((name) => `    ${name}=${python(body[name], "    ")},\n`);
  return `${withKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${base}v1", api_key=${key})
stream = client.chat.completions.create(
${lines.join("")}    extra_body=${python(own, "    ")},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print("\\n", chunk.usage.trserve)
`;
}
