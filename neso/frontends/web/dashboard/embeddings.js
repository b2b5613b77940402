// Embeddings of texts, and their similarities.

import { postJson } from "./api.js";
import { html, useState } from "./lib.js";

const PATH = "v1/embeddings";

/** Cosine similarity of two vectors. */
export function cosine(left, right) {
    let [dot, lengthLeft, lengthRight] = [0, 0, 0];
    for (let index = 0; index < left.length; index += 1) {
        dot += left[index] * right[index];
        lengthLeft += left[index] ** 2;
        lengthRight += right[index] ** 2;
    }
    return dot / Math.sqrt(lengthLeft * lengthRight || 1);
}

export function Embeddings({ model, locked, onAccess, onCode }) {
    const [text, setText] = useState("The moon orbits the planet.\nA satellite circles Neptune.\nI had soup for lunch.");
    const [result, setResult] = useState(null);
    const [problem, setProblem] = useState("");
    const texts = text.split("\n").filter((line) => line.trim());
    const body = { model: model.name, input: texts, encoding_format: "float" };
    const run = async () => {
        setProblem("");
        try {
            const response = await postJson(PATH, body);
            setResult({ texts, vectors: response.data.map((entry) => entry.embedding) });
        } catch (error) {
            setProblem(error.message);
        }
    };
    return html`
        <div class="messages form">
            <label>Texts, one per line
                <textarea rows="6" value=${text} disabled=${locked}
                    onInput=${(event) => setText(event.target.value)}></textarea></label>
            <div class="row">
                <button type="button" class="quiet" onClick=${() => onCode(PATH, body)}>Code</button>
                <span class="space"></span>
                ${locked
        ? html`<button type="button" class="primary" onClick=${onAccess}>Enter key</button>`
        : html`<button type="button" class="primary" disabled=${!texts.length} onClick=${run}>Embed</button>`}
            </div>
            ${problem && html`<p class="banner error" role="alert">${problem}</p>`}
            ${result && html`
                <h3>Cosine similarity</h3>
                <p class="hint">${result.vectors.length} vectors of ${result.vectors[0].length} dimensions</p>
                <div class="table-frame"><table>
                    <thead><tr><th>Text</th>${result.texts.map((_, index) => html`
                        <th class="number">${index + 1}</th>`)}</tr></thead>
                    <tbody>${result.texts.map((row, index) => html`
                        <tr><td>${index + 1}. ${row}</td>${result.vectors.map((vector) => html`
                            <td class="number">${cosine(result.vectors[index], vector).toFixed(3)}</td>`)}</tr>`)}
                    </tbody>
                </table></div>`}
        </div>
    `;
}
