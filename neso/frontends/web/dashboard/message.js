// One message of a conversation.

import { CopyButton, html, useState } from "./lib.js";
import { Markdown } from "./markdown.js";
import { Timeline, progressSummary, timingSummary } from "./timeline.js";
import { Tokens } from "./tokens.js";

const NAMES = { user: "You", tool: "Tool result" };

export function Message({ message, streaming, idle, isLast, onEdit, onRegenerate, onContinue, onResults }) {
    const { role } = message;
    return html`
        <article class="message ${role}" aria-label=${NAMES[role] ?? message.model} aria-busy=${streaming}>
            <h3 class="author">${NAMES[role] ?? message.model}${role === "tool" && html` <code>${message.name}</code>`}</h3>
            ${role === "assistant"
        ? html`<${Reply} message=${message} streaming=${streaming} idle=${idle} isLast=${isLast}
                    onRegenerate=${onRegenerate} onContinue=${onContinue} onResults=${onResults} />`
        : html`<${Request} message=${message} idle=${idle} onEdit=${onEdit} />`}
        </article>
    `;
}

function Request({ message, idle, onEdit }) {
    const [draft, setDraft] = useState(null);
    if (draft !== null) {
        const submit = (event) => {
            event.preventDefault();
            setDraft(null);
            onEdit(draft);
        };
        return html`
            <form class="stack" onSubmit=${submit}>
                <textarea rows="3" aria-label="Edited message" value=${draft}
                    onInput=${(event) => setDraft(event.target.value)}></textarea>
                <div class="row end">
                    <button type="button" class="quiet" onClick=${() => setDraft(null)}>Cancel</button>
                    <button type="submit" class="primary" disabled=${!draft.trim()}>Send</button>
                </div>
            </form>`;
    }
    return html`
        ${message.images?.length > 0 && html`
            <div class="thumbnails">${message.images.map((image) => html`<img src=${image} alt="Attached image" />`)}</div>`}
        <p class="plain">${message.text}</p>
        <div class="row message-tools">
            <${CopyButton} text=${message.text} />
            ${idle && message.role === "user" && html`
                <button type="button" class="quiet" onClick=${() => setDraft(message.text)}>Edit</button>`}
        </div>
    `;
}

function Reply({ message, streaming, idle, isLast, onRegenerate, onContinue, onResults }) {
    const [view, setView] = useState("text");
    const [details, setDetails] = useState(false);
    const { text, reasoning, calls, tokens, timing, error, stopped, finish } = message;
    const showTokens = tokens.length > 0 && view === "text" ? true : view === "tokens";
    const unfinished = (stopped || error || finish === "length") && text && !reasoning && !calls.length;
    const waiting = streaming && !text && !reasoning && !calls.length && !tokens.length;
    return html`
        ${reasoning && html`
            <details class="reasoning" open=${streaming && !text}>
                <summary>Reasoning</summary><p class="plain">${reasoning}</p></details>`}
        ${waiting && html`<p class="typing" aria-label="Waiting for the first token"><i></i><i></i><i></i></p>`}
        ${showTokens && tokens.length > 0
        ? html`<${Tokens} tokens=${tokens} />`
        : text && html`<${Markdown} text=${text} />`}
        ${calls.filter(Boolean).map((call) => html`
            <div class="call">
                <div class="code-title"><span>Calls <code>${call.name}</code></span></div>
                <pre class="code" tabindex="0">${pretty(call.arguments)}</pre>
            </div>`)}
        ${isLast && idle && calls.length > 0 && html`<${Results} calls=${calls} onResults=${onResults} />`}
        ${error && html`<p class="banner error" role="alert">${error}</p>`}
        ${streaming && html`<p class="hint progress" aria-live="off">${progressSummary(timing)}</p>`}
        ${!streaming && html`
            <div class="row message-tools">
                <${CopyButton} text=${text} />
                ${idle && html`<button type="button" class="quiet" onClick=${onRegenerate}>Regenerate</button>`}
                ${isLast && idle && unfinished && html`
                    <button type="button" class="quiet" onClick=${onContinue}>Continue</button>`}
                ${tokens.length > 0 && html`
                    <button type="button" class="quiet" onClick=${() => setView(view === "text" ? "markdown" : "text")}>
                        ${view === "text" ? "As text" : "As tokens"}</button>`}
                <button type="button" class="quiet" aria-expanded=${details} onClick=${() => setDetails(!details)}>
                    Timeline</button>
                <span class="summary">
                    ${[stopped ? "stopped" : finish === "length" ? "length limit" : "", timingSummary(timing)]
        .filter(Boolean).join(" · ")}</span>
            </div>`}
        ${details && !streaming && html`<${Timeline} timing=${timing} />`}
    `;
}

function Results({ calls, onResults }) {
    const [texts, setTexts] = useState({});
    const submit = (event) => {
        event.preventDefault();
        onResults(calls.map((call, index) => ({ role: "tool", id: call.id, name: call.name, text: texts[index] ?? "" })));
    };
    return html`
        <form class="stack" onSubmit=${submit}>
            ${calls.map((call, index) => html`
                <label>Result of <code>${call.name}</code>
                    <textarea rows="2" class="mono" value=${texts[index] ?? ""}
                        onInput=${(event) => setTexts({ ...texts, [index]: event.target.value })}></textarea></label>`)}
            <div class="row end"><button type="submit" class="primary">Send results</button></div>
        </form>
    `;
}

function pretty(text) {
    try {
        return JSON.stringify(JSON.parse(text), null, 2);
    } catch {
        return text;
    }
}
