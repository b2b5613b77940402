// Renders Markdown of models as elements, never as HTML: model text cannot add elements, attributes or scripts.

import { CopyButton, html } from "./lib.js";

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([^\n]+?)\*\*|(?<![\w*])\*([^\s*][^*\n]*?)\*(?![\w*])|\[([^\]\n]+)\]\(([^\s()]+)\)/;
const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

/** Elements of a text: paragraphs, headings, lists, tables, quotes, code. */
export function Markdown({ text }) {
    return html`<div class="markdown">${blocksOf(text.split("\n"))}</div>`;
}

function blocksOf(lines) {
    const blocks = [];
    let at = 0;
    while (at < lines.length) {
        const read = [readFence, readHeading, readList, readQuote, readTable].find((each) => each(lines, at));
        const [block, next] = read ? read(lines, at) : readParagraph(lines, at);
        if (block) {
            blocks.push(block);
        }
        at = next;
    }
    return blocks;
}

function readFence(lines, at) {
    const fence = FENCE.exec(lines[at]);
    if (!fence) {
        return null;
    }
    let end = at + 1;
    while (end < lines.length && !lines[end].trim().startsWith(fence[1])) {
        end += 1;
    }
    const code = lines.slice(at + 1, end).join("\n");
    const block = html`
        <div class="code-block">
            <div class="code-title"><span>${fence[2]}</span><${CopyButton} text=${code} /></div>
            <pre class="code" tabindex="0">${code}</pre>
        </div>`;
    return [block, end + 1];
}

function readHeading(lines, at) {
    const heading = HEADING.exec(lines[at]);
    return heading && [html`<p class="heading" role="heading" aria-level="4">${inline(heading[2])}</p>`, at + 1];
}

function readList(lines, at) {
    const first = ITEM.exec(lines[at]);
    if (!first) {
        return null;
    }
    const indent = first[1].length;
    const items = [];
    let end = at;
    while (end < lines.length) {
        const item = ITEM.exec(lines[end]);
        if (item && item[1].length <= indent + 1) {
            items.push([item[3]]);
        } else if (items.length && lines[end].trim() && lines[end].startsWith(" ")) {
            items.at(-1).push(lines[end].slice(Math.min(indent + 2, lines[end].search(/\S/))));
        } else {
            break;
        }
        end += 1;
    }
    const contents = items.map((item) => html`<li>${item.length > 1 ? blocksOf(item) : inline(item[0])}</li>`);
    const ordered = /\d/.test(first[2]);
    return [ordered ? html`<ol start=${parseInt(first[2], 10)}>${contents}</ol>` : html`<ul>${contents}</ul>`, end];
}

function readQuote(lines, at) {
    let end = at;
    while (end < lines.length && lines[end].startsWith(">")) {
        end += 1;
    }
    const inner = lines.slice(at, end).map((line) => line.replace(/^> ?/, ""));
    return end > at ? [html`<blockquote>${blocksOf(inner)}</blockquote>`, end] : null;
}

function readTable(lines, at) {
    const isRow = (line) => line !== undefined && line.trim().startsWith("|");
    if (!isRow(lines[at]) || !/^\s*\|[\s:|-]+\|?\s*$/.test(lines[at + 1] ?? "")) {
        return null;
    }
    let end = at + 2;
    while (isRow(lines[end])) {
        end += 1;
    }
    const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
    const block = html`
        <div class="table-frame"><table>
            <thead><tr>${cells(lines[at]).map((cell) => html`<th>${cell}</th>`)}</tr></thead>
            <tbody>${lines.slice(at + 2, end).map((line) => html`
                <tr>${cells(line).map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody>
        </table></div>`;
    return [block, end];
}

function readParagraph(lines, at) {
    let end = at;
    while (end < lines.length && lines[end].trim()
        && (end === at || !(FENCE.test(lines[end]) || HEADING.test(lines[end]) || ITEM.test(lines[end])))) {
        end += 1;
    }
    return end > at ? [html`<p>${inline(lines.slice(at, end).join("\n"))}</p>`, end] : [null, at + 1];
}

function inline(text) {
    const parts = [];
    let rest = text;
    while (rest) {
        const match = INLINE.exec(rest);
        if (!match) {
            parts.push(rest);
            break;
        }
        parts.push(rest.slice(0, match.index));
        const [whole, , code, strong, emphasis, title, target] = match;
        if (code !== undefined) {
            parts.push(html`<code>${code.trim()}</code>`);
        } else if (strong !== undefined) {
            parts.push(html`<strong>${inline(strong)}</strong>`);
        } else if (emphasis !== undefined) {
            parts.push(html`<em>${inline(emphasis)}</em>`);
        } else {
            parts.push(link(title, target, whole));
        }
        rest = rest.slice(match.index + whole.length);
    }
    return parts;
}

/** Only links to web pages become links. */
function link(title, target, whole) {
    return /^https?:\/\//i.test(target)
        ? html`<a href=${target} target="_blank" rel="noopener noreferrer nofollow">${title}</a>`
        : whole;
}
