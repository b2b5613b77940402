// Parameters of the playground's requests.

import { html } from "./lib.js";

/** name, title, minimum, maximum, step. An empty field leaves the model's default. */
const NUMBERS = [
    ["temperature", "Temperature", 0, 2, 0.1],
    ["top_p", "Top p", 0, 1, 0.05],
    ["top_k", "Top k", -1, undefined, 1],
    ["min_p", "Min p", 0, 1, 0.01],
    ["max_tokens", "Max tokens", 1, undefined, 1],
    ["seed", "Seed", undefined, undefined, 1],
    ["presence_penalty", "Presence penalty", -2, 2, 0.1],
    ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
    ["repetition_penalty", "Repetition penalty", 0.01, undefined, 0.05],
];

export const DEFAULTS = { numbers: {}, stop: "", system: "", logprobs: false, alternatives: 5, tools: "", toolChoice: "auto", extra: "" };

const EXAMPLE_TOOLS = JSON.stringify([{
    type: "function",
    function: {
        name: "get_weather",
        description: "Get the weather of a city",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
}], null, 2);

/** Fields of a request. Throws an error that names the field that is not valid JSON. */
export function requestFields(settings, mode) {
    const fields = {};
    for (const [name] of NUMBERS) {
        const text = settings.numbers[name];
        if (text !== undefined && text !== "") {
            fields[name] = Number(text);
        }
    }
    const stops = settings.stop.split("\n").filter((line) => line !== "");
    if (stops.length) {
        fields.stop = stops;
    }
    if (settings.logprobs) {
        const count = Math.max(1, Math.min(Number(settings.alternatives) || 5, 20));
        Object.assign(fields, mode === "chat" ? { logprobs: true, top_logprobs: count } : { logprobs: count });
    }
    if (mode === "chat") {
        const tools = parse(settings.tools, "Tools");
        if (tools !== null && !Array.isArray(tools)) {
            throw new Error("Tools: expected a JSON array of tools.");
        }
        if (tools?.length) {
            fields.tools = tools;
            const name = toolNames(settings.tools).find((each) => each === settings.toolChoice);
            if (name !== undefined) {
                fields.tool_choice = { type: "function", function: { name } };
            } else if (["required", "none"].includes(settings.toolChoice)) {
                fields.tool_choice = settings.toolChoice;
            }
        }
    }
    const extra = parse(settings.extra, "Further fields");
    if (extra !== null && (typeof extra !== "object" || Array.isArray(extra))) {
        throw new Error("Further fields: expected a JSON object.");
    }
    return { ...fields, ...extra };
}

/** Names of the functions in a text of tools; none if it is not valid. */
function toolNames(text) {
    try {
        return JSON.parse(text).map((tool) => tool.function.name);
    } catch {
        return [];
    }
}

function parse(text, title) {
    if (!text.trim()) {
        return null;
    }
    try {
        return JSON.parse(text);
    } catch (error) {
        throw new Error(`${title}: ${error.message}`);
    }
}

export function Settings({ settings, mode, onChange }) {
    const set = (name) => (event) => onChange({ ...settings, [name]: event.target.value });
    const setNumber = (name) => (event) =>
        onChange({ ...settings, numbers: { ...settings.numbers, [name]: event.target.value } });
    return html`
        <form class="settings stack" aria-label="Parameters" onSubmit=${(event) => event.preventDefault()}>
            ${mode === "chat" && html`
                <label>System prompt
                    <textarea rows="3" value=${settings.system} onInput=${set("system")}
                        placeholder="None"></textarea></label>`}
            <fieldset>
                <legend>Sampling</legend>
                <div class="grid">
                    ${NUMBERS.map(([name, title, min, max, step]) => html`
                        <label>${title}
                            <input type="number" min=${min} max=${max} step=${step} placeholder="default"
                                value=${settings.numbers[name] ?? ""} onInput=${setNumber(name)} /></label>`)}
                </div>
                <label>Stop strings, one per line
                    <textarea rows="1" value=${settings.stop} onInput=${set("stop")}></textarea></label>
            </fieldset>
            <fieldset>
                <legend>Log probabilities</legend>
                <label class="check">
                    <input type="checkbox" checked=${settings.logprobs}
                        onChange=${(event) => onChange({ ...settings, logprobs: event.target.checked })} />
                    Show tokens with alternatives
                </label>
                ${settings.logprobs && html`
                    <label>Alternatives per token
                        <input type="number" min="1" max="20" value=${settings.alternatives}
                            onInput=${set("alternatives")} /></label>`}
            </fieldset>
            ${mode === "chat" && html`
                <details open=${settings.tools !== ""}>
                    <summary>Tools</summary>
                    <label>JSON array of tools
                        <textarea rows="6" class="mono" spellcheck="false" value=${settings.tools}
                            onInput=${set("tools")} placeholder=${EXAMPLE_TOOLS}></textarea></label>
                    <button type="button" class="quiet" onClick=${() => onChange({ ...settings, tools: EXAMPLE_TOOLS })}>
                        Use the example</button>
                    <label class="inline">Tool choice
                        <select value=${settings.toolChoice} onChange=${set("toolChoice")}>
                            ${["auto", "required", "none", ...toolNames(settings.tools)].map((each) => html`
                                <option value=${each}>${each}</option>`)}
                        </select></label>
                </details>`}
            <details open=${settings.extra !== ""}>
                <summary>Further fields</summary>
                <label>JSON object, added to the request
                    <textarea rows="4" class="mono" spellcheck="false" value=${settings.extra} onInput=${set("extra")}
                        placeholder='{"response_format": {"type": "json_object"}}'></textarea></label>
            </details>
            <button type="button" class="quiet" onClick=${() => onChange(DEFAULTS)}>Reset all</button>
        </form>
    `;
}
