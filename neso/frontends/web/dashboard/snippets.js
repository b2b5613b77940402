// The request of the playground as code to copy.

import { url } from "./api.js";
import { CopyButton, Dialog, html, useState } from "./lib.js";

/** A curl command. The key is taken from the environment, so that it is not shown. */
export function curlCommand(path, body, hasKey) {
    const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
    const key = hasKey ? ` \\\n  -H "Authorization: Bearer $NESO_API_KEY"` : "";
    return `curl ${url(path)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'\n`;
}

const CREATE = {
    "v1/chat/completions": "chat.completions.create",
    "v1/completions": "completions.create",
    "v1/embeddings": "embeddings.create",
};
const OPENAI_FIELDS = new Set([
    "model", "messages", "prompt", "input", "temperature", "top_p", "max_tokens", "seed", "stop", "presence_penalty",
    "frequency_penalty", "stream", "stream_options", "logprobs", "top_logprobs", "tools", "tool_choice",
    "response_format", "encoding_format",
]);

/** A program that uses OpenAI's client. Fields that the client does not know are sent as `extra_body`. */
export function pythonProgram(path, body, hasKey) {
    const known = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
    const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name)));
    const fields = known.map(([name, value]) => `    ${name}=${pythonValue(value, 1)},\n`).join("")
        + (Object.keys(extra).length ? `    extra_body=${pythonValue(extra, 1)},\n` : "");
    const key = hasKey ? 'os.environ["NESO_API_KEY"]' : '"none"';
    const text = path === "v1/completions" ? "chunk.choices[0].text" : "chunk.choices[0].delta.content or \"\"";
    const calls = body.tools
        ? `        for call in chunk.choices[0].delta.tool_calls or []:\n`
            + `            print(call.function.name or "", call.function.arguments or "", end="", flush=True)\n` : "";
    const output = body.stream
        ? `for chunk in response:\n    if chunk.choices:\n        print(${text}, end="", flush=True)\n${calls}`
        : "print(response)\n";
    return `${hasKey ? "import os\n\n" : ""}import openai\n\n`
        + `client = openai.OpenAI(base_url=${pythonValue(url("v1"))}, api_key=${key})\n`
        + `response = client.${CREATE[path]}(\n${fields})\n${output}`;
}

/** A JSON value as a Python expression. */
export function pythonValue(value, depth = 0) {
    if (value === null) {
        return "None";
    }
    if (typeof value === "boolean") {
        return value ? "True" : "False";
    }
    if (typeof value !== "object") {
        return JSON.stringify(value);
    }
    const items = Array.isArray(value)
        ? value.map((item) => pythonValue(item, depth + 1))
        : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${pythonValue(item, depth + 1)}`);
    const [open, close] = Array.isArray(value) ? "[]" : "{}";
    const line = `${open}${items.join(", ")}${close}`;
    if (line.length + depth * 4 < 88) {
        return line;
    }
    const indent = "    ".repeat(depth + 1);
    return `${open}\n${items.map((item) => `${indent}${item},\n`).join("")}${"    ".repeat(depth)}${close}`;
}

/** A dialog with the request as curl and Python. `body` is shown with `data:` images shortened. */
export function CodeDialog({ path, body, hasKey, onClose }) {
    const [language, setLanguage] = useState("curl");
    const make = language === "curl" ? curlCommand : pythonProgram;
    const text = make(path, body, hasKey);
    return html`
        <${Dialog} title="This request as code" onClose=${onClose}>
            <div class="section">
                <div class="segments" role="group" aria-label="Language">
                    ${[["curl", "curl"], ["python", "Python"]].map(([name, title]) => html`
                        <button type="button" aria-pressed=${language === name}
                            onClick=${() => setLanguage(name)}>${title}</button>`)}
                </div>
                <${CopyButton} text=${text} />
            </div>
            <pre class="code" tabindex="0">${make(path, shortened(body), hasKey)}</pre>
        <//>
    `;
}

function shortened(value) {
    if (typeof value === "string") {
        return value.startsWith("data:") && value.length > 120 ? `${value.slice(0, 60)}…` : value;
    }
    if (Array.isArray(value)) {
        return value.map(shortened);
    }
    return value !== null && typeof value === "object"
        ? Object.fromEntries(Object.entries(value).map(([name, item]) => [name, shortened(item)])) : value;
}
