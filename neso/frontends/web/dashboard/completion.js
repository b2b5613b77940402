// Completion of a text, without chat template.

import { STREAM_FIELDS, useGeneration } from "./generation.js";
import { CopyButton, html, useState } from "./lib.js";
import { requestFields } from "./settings.js";
import { Timeline, timingSummary } from "./timeline.js";
import { Tokens, tokensOf } from "./tokens.js";

const PATH = "v1/completions";
const DEFAULT_MAX_TOKENS = 128;

export function Completion({ model, settings, locked, onAccess, onCode }) {
    const [prompt, setPrompt] = useState("Once upon a time");
    const [output, setOutput] = useState(null);
    const [problem, setProblem] = useState("");
    const { running, start, stop } = useGeneration();

    const withBody = async (use) => {
        try {
            setProblem("");
            const fields = { max_tokens: DEFAULT_MAX_TOKENS, ...requestFields(settings, "completions") };
            await use({ model: model.name, prompt, ...fields, ...STREAM_FIELDS });
        } catch (error) {
            setProblem(error.message);
        }
    };
    const run = () => withBody(async (body) => {
        const result = { text: "", tokens: [] };
        const add = (event) => {
            const choice = event.choices?.[0];
            result.text += choice?.text ?? "";
            result.tokens.push(...tokensOf(choice?.logprobs));
        };
        await start(PATH, body, add, (progress) => setOutput({ ...result, tokens: [...result.tokens], ...progress }));
    });
    const showCode = () => withBody((body) => onCode(PATH, body));
    return html`
        <div class="messages form">
            <label>Prompt
                <textarea rows="6" class="mono" value=${prompt} disabled=${locked}
                    onInput=${(event) => setPrompt(event.target.value)}></textarea></label>
            <div class="row">
                <button type="button" class="quiet" onClick=${showCode}>Code</button>
                <span class="space"></span>
                ${locked
        ? html`<button type="button" class="primary" onClick=${onAccess}>Enter key</button>`
        : running
            ? html`<button type="button" class="danger" onClick=${stop}>Stop</button>`
            : html`<button type="button" class="primary" disabled=${!prompt} onClick=${run}>Complete</button>`}
            </div>
            ${problem && html`<p class="banner error" role="alert">${problem}</p>`}
            ${output && html`
                <article class="message assistant" aria-label="Completion" aria-busy=${running}>
                    <h3 class="author">Completion</h3>
                    ${output.tokens.length
        ? html`<${Tokens} tokens=${output.tokens} />`
        : html`<p class="plain mono">${output.text}</p>`}
                    ${output.error && html`<p class="banner error" role="alert">${output.error}</p>`}
                    ${!running && html`
                        <div class="row message-tools"><${CopyButton} text=${output.text} />
                            <span class="summary">${timingSummary(output.timing)}</span></div>
                        <${Timeline} timing=${output.timing} />`}
                </article>`}
        </div>
    `;
}
