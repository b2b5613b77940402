// Tokens of a message, coloured by probability. Hovering or focusing one shows the alternatives.

import { html, useState } from "./lib.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1];

/** Tokens of a chunk's choice, in the format of chats or of completions: [{token, logprob, top: [[token, logprob]]}]. */
export function tokensOf(logprobs) {
    if (!logprobs) {
        return [];
    }
    if (logprobs.content) {
        return logprobs.content.map((entry) => ({
            token: entry.token,
            logprob: entry.logprob,
            top: entry.top_logprobs.map((other) => [other.token, other.logprob]),
        }));
    }
    return (logprobs.tokens ?? []).map((token, index) => ({
        token,
        logprob: logprobs.token_logprobs[index],
        top: Object.entries(logprobs.top_logprobs?.[index] ?? {}),
    }));
}

/** `tokens` as text; the level of a token is 0 for the most likely to 4. */
export function Tokens({ tokens }) {
    const [shown, setShown] = useState(null);
    const move = (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step !== undefined) {
            const next = event.target.parentElement.children[Number(event.target.dataset.index) + step];
            event.preventDefault();
            next?.focus();
        } else if (event.key === "Escape") {
            setShown(null);
        }
    };
    const show = (index) => (event) => {
        const box = event.target.getBoundingClientRect();
        setShown({ index, left: box.left, top: box.bottom, above: box.bottom > innerHeight - 220 ? box.top : null });
    };
    return html`
        <div class="tokens" onKeyDown=${move} onMouseLeave=${() => setShown(null)}
            aria-label="Tokens; arrow keys move between them">
            ${tokens.map(({ token, logprob }, index) => html`
                <span class="token level-${levelOf(logprob)}" data-index=${index} tabindex=${index === 0 ? 0 : -1}
                    aria-describedby=${shown?.index === index ? "token-tip" : null}
                    onMouseEnter=${show(index)} onFocus=${show(index)} onBlur=${() => setShown(null)}>${token}</span>`)}
        </div>
        ${shown && tokens[shown.index] && html`<${Alternatives} token=${tokens[shown.index]} place=${shown} />`}
    `;
}

function levelOf(logprob) {
    const level = LEVELS.findIndex((least) => Math.exp(logprob ?? 0) >= least);
    return level < 0 ? LEVELS.length : level;
}

function Alternatives({ token, place }) {
    const rows = token.top.some(([text]) => text === token.token)
        ? token.top : [[token.token, token.logprob], ...token.top];
    const style = {
        left: `${Math.max(8, Math.min(place.left, innerWidth - 308))}px`,
        top: place.above === null ? `${place.top + 6}px` : "auto",
        bottom: place.above === null ? "auto" : `${innerHeight - place.above + 6}px`,
    };
    return html`
        <div class="token-tip" id="token-tip" role="tooltip" style=${style}>
            <table>
                <thead><tr><th>Token</th><th class="number">Probability</th><th class="number">Log</th></tr></thead>
                <tbody>
                    ${rows.map(([text, logprob]) => html`
                        <tr class=${text === token.token ? "chosen" : ""}>
                            <td><code>${visible(text)}</code></td>
                            <td class="number">
                                <meter min="0" max="1" value=${Math.exp(logprob)} aria-hidden="true"></meter>
                                <span>${formatProbability(Math.exp(logprob))}</span>
                            </td>
                            <td class="number">${logprob === null ? "–" : logprob.toFixed(2)}</td>
                        </tr>`)}
                </tbody>
            </table>
        </div>
    `;
}

function formatProbability(value) {
    return value < 0.0001 ? "<0.01%" : `${(value * 100).toFixed(2)}%`;
}

/** A token with its white space made visible. */
function visible(text) {
    return text === "" ? "(empty)" : text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}
