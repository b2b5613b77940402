// The chat: a conversation with one model, streamed.

import { deleteConversation, keepConversation, listConversations, loadConversation, newId } from "./conversations.js";
import { STREAM_FIELDS, useGeneration } from "./generation.js";
import { html, load, save, useEffect, useRef, useState } from "./lib.js";
import { Message } from "./message.js";
import { requestFields } from "./settings.js";
import { tokensOf } from "./tokens.js";

const PATH = "v1/chat/completions";
const CURRENT = "neso.conversation";
const SUGGESTIONS = ["What is in-flight batching?", "What can you do?", "Write a haiku about the moon."];
const MAX_IMAGE_BYTES = 20 << 20;

/** Messages of a request in OpenAI's format. */
export function requestMessages(system, messages) {
    const result = system.trim() ? [{ role: "system", content: system }] : [];
    for (const message of messages) {
        if (message.role === "user" && message.images.length) {
            const images = message.images.map((image) => ({ type: "image_url", image_url: { url: image } }));
            result.push({ role: "user", content: [...images, { type: "text", text: message.text }] });
        } else if (message.role === "tool") {
            result.push({ role: "tool", tool_call_id: message.id, content: message.text });
        } else if (message.role === "assistant" && message.calls.length) {
            const calls = message.calls.map(({ id, name, arguments: text }) =>
                ({ id, type: "function", function: { name, arguments: text } }));
            result.push({ role: "assistant", content: message.text || null, tool_calls: calls });
        } else {
            result.push({ role: message.role, content: message.text });
        }
    }
    return result;
}

/** Add the event of a stream to the assistant's message. */
export function addEvent(message, event) {
    const choice = event.choices?.[0];
    if (!choice) {
        return;
    }
    const { delta } = choice;
    message.text += delta.content ?? "";
    message.reasoning += delta.reasoning_content ?? "";
    message.tokens.push(...tokensOf(choice.logprobs));
    message.finish = choice.finish_reason ?? message.finish;
    for (const part of delta.tool_calls ?? []) {
        const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
        call.id = part.id ?? call.id;
        call.name += part.function?.name ?? "";
        call.arguments += part.function?.arguments ?? "";
    }
}

export function Chat({ model, settings, locked, onAccess, onCode }) {
    const [id, setId] = useState(() => load(sessionStorage, CURRENT, null) ?? newId());
    const [messages, setMessages] = useState(() => loadConversation(id));
    const [dragging, setDragging] = useState(false);
    const [text, setText] = useState("");
    const [images, setImages] = useState([]);
    const [problem, setProblem] = useState("");
    const { running, start, stop } = useGeneration();
    const list = useRef(null);
    const follow = useRef(true);

    useEffect(() => {
        if (follow.current) {
            list.current.scrollTop = list.current.scrollHeight;
        }
    }, [messages]);
    useEffect(() => {
        save(sessionStorage, CURRENT, id);
    }, [id]);

    const bodyOf = (conversation) => ({
        model: model.name,
        messages: requestMessages(settings.system, conversation),
        ...requestFields(settings, "chat"),
        ...STREAM_FIELDS,
    });
    const keep = (conversation) =>
        setProblem(keepConversation(id, conversation) ? "" : "The browser has no space to keep this conversation.");
    const open = (name) => {
        setId(name);
        setMessages(loadConversation(name));
        setProblem("");
        follow.current = true;
    };
    /** Request an answer, or the rest of the answer `begun`. */
    const run = async (conversation, begun = null) => {
        let body;
        try {
            body = begun
                ? { ...bodyOf([...conversation, begun]), continue_final_message: true } : bodyOf(conversation);
        } catch (error) {
            setProblem(error.message);
            return;
        }
        keep(begun ? [...conversation, begun] : conversation);
        follow.current = true;
        const reply = {
            role: "assistant", model: model.name, text: begun?.text ?? "", reasoning: "", calls: [],
            tokens: [...begun?.tokens ?? []], finish: null,
        };
        let shown;
        await start(PATH, body, (event) => addEvent(reply, event), (progress) => {
            shown = [...conversation, { ...reply, calls: [...reply.calls], tokens: [...reply.tokens], ...progress }];
            setMessages(shown);
        });
        keep(shown);
    };
    const send = (content = text) => {
        if (!running && !locked && (content.trim() || images.length)) {
            run([...messages, { role: "user", text: content, images }]);
            setText("");
            setImages([]);
        }
    };
    const showCode = () => {
        try {
            const open = text.trim() || images.length ? [{ role: "user", text, images }] : [];
            const answered = open.length || messages.at(-1)?.role !== "assistant" ? messages : messages.slice(0, -1);
            const shown = [...answered, ...open];
            onCode(PATH, bodyOf(shown.length ? shown : [{ role: "user", text: SUGGESTIONS[0], images: [] }]));
            setProblem("");
        } catch (error) {
            setProblem(error.message);
        }
    };
    const onScroll = () => {
        const { scrollTop, scrollHeight, clientHeight } = list.current;
        follow.current = scrollHeight - scrollTop - clientHeight < 60;
    };
    const addImages = async (files) => {
        const chosen = [...files].filter((file) => file.type.startsWith("image/"));
        if (model.images === false) {
            setProblem(`${model.name} takes text only.`);
            return;
        }
        if (chosen.length < files.length) {
            setProblem("Only images can be added.");
            return;
        }
        if (chosen.some((file) => file.size > MAX_IMAGE_BYTES)) {
            setProblem("An image is larger than 20 MB.");
            return;
        }
        setProblem("");
        const added = await Promise.all(chosen.map(readAsDataUrl));
        setImages((known) => [...known, ...added]);
    };
    const isFileDrag = (event) => event.dataTransfer.types.includes("Files");
    const onDragOver = (event) => {
        if (isFileDrag(event)) {
            event.preventDefault(); // otherwise the browser opens the file instead of this page
            setDragging(!locked);
        }
    };
    const onDrop = (event) => {
        if (isFileDrag(event)) {
            event.preventDefault();
            setDragging(false);
            if (!locked) {
                addImages(event.dataTransfer.files);
            }
        }
    };
    const last = messages.length - 1;
    return html`
        <div class="chat ${dragging ? "dragging" : ""}" onDragOver=${onDragOver} onDrop=${onDrop}
            onDragLeave=${() => setDragging(false)}>
            <div class="messages" ref=${list} onScroll=${onScroll} role="log" aria-label="Conversation" tabindex="0">
                ${messages.length === 0 && html`
                    <div class="empty welcome">
                        <h2>Chat with ${model.name}</h2>
                        <div class="suggestions">
                            ${SUGGESTIONS.map((each) => html`
                                <button type="button" disabled=${locked} onClick=${() => send(each)}>${each}</button>`)}
                        </div>
                        <${Conversations} onOpen=${open} />
                    </div>`}
                ${messages.map((message, index) => html`
                    <${Message} key=${`${id} ${index}`} message=${message} streaming=${running && index === last}
                        idle=${!running} isLast=${index === last}
                        onEdit=${(edited) => run([...messages.slice(0, index), { ...message, text: edited }])}
                        onRegenerate=${() => run(messages.slice(0, index))}
                        onContinue=${() => run(messages.slice(0, index), message)}
                        onResults=${(results) => run([...messages, ...results])} />`)}
            </div>
            ${problem && html`<p class="banner error" role="alert">${problem}</p>`}
            <${Composer} text=${text} images=${images} model=${model} running=${running} locked=${locked}
                onText=${setText} onImages=${addImages}
                onRemove=${(index) => setImages(images.filter((each, at) => at !== index))}
                onSend=${send} onStop=${stop} onAccess=${onAccess} onCode=${showCode}
                onNew=${messages.length > 0 && !running && (() => open(newId()))} />
        </div>
    `;
}

/** The kept conversations. */
function Conversations({ onOpen }) {
    const [entries, setEntries] = useState(listConversations);
    const remove = (id) => {
        deleteConversation(id);
        setEntries(listConversations());
    };
    if (!entries.length) {
        return html`<p class="hint">Conversations are kept in this browser only.</p>`;
    }
    return html`
        <section class="conversations" aria-label="Conversations">
            <header class="section"><h3>Conversations in this browser</h3>
                <button type="button" class="quiet"
                    onClick=${() => confirm("Delete all conversations?") && remove(null)}>Delete all</button></header>
            <ul>
                ${entries.map(({ id, title, changed }) => html`
                    <li key=${id}>
                        <button type="button" class="quiet title" onClick=${() => onOpen(id)}>${title}</button>
                        <time class="hint">${new Date(changed).toLocaleDateString()}</time>
                        <button type="button" class="quiet icon" aria-label="Delete ${title}"
                            onClick=${() => remove(id)}>✕</button>
                    </li>`)}
            </ul>
        </section>
    `;
}

function readAsDataUrl(file) {
    return new Promise((resolve, reject) => {
        const reader = new FileReader();
        reader.onload = () => resolve(reader.result);
        reader.onerror = () => reject(reader.error);
        reader.readAsDataURL(file);
    });
}

function Composer({
    text, images, model, running, locked, onText, onImages, onRemove, onSend, onStop, onAccess, onCode, onNew,
}) {
    const area = useRef(null);
    const file = useRef(null);
    useEffect(() => {
        area.current.style.height = "auto";
        area.current.style.height = `${Math.min(area.current.scrollHeight + 2, 220)}px`;
    }, [text]);
    const onKeyDown = (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            onSend();
        } else if (event.key === "Escape" && running) {
            onStop();
        }
    };
    const pick = (event) => {
        onImages(event.target.files);
        event.target.value = "";
    };
    const acceptsImages = model.images !== false;
    const onPaste = (event) => event.clipboardData.files.length && onImages(event.clipboardData.files);
    return html`
        <div class="composer">
            ${images.length > 0 && html`
                <div class="thumbnails">
                    ${images.map((image, index) => html`
                        <button type="button" onClick=${() => onRemove(index)} aria-label="Remove image ${index + 1}">
                            <img src=${image} alt="" /></button>`)}
                </div>`}
            <textarea ref=${area} rows="1" value=${text} aria-label="Message" disabled=${locked}
                placeholder=${locked ? "Chats need a key" : `Message ${model.name}`}
                onInput=${(event) => onText(event.target.value)} onKeyDown=${onKeyDown} onPaste=${onPaste}></textarea>
            <div class="row">
                <input ref=${file} type="file" accept="image/*" multiple hidden onChange=${pick} />
                <button type="button" class="quiet" disabled=${!acceptsImages || locked}
                    title=${acceptsImages ? "Add images" : "This model takes text only"}
                    onClick=${() => file.current.click()}>Image</button>
                <button type="button" class="quiet" onClick=${onCode}>Code</button>
                ${onNew && html`<button type="button" class="quiet" onClick=${onNew}>New chat</button>`}
                <span class="space"></span>
                <span class="hint wide">Enter sends, Shift+Enter adds a line</span>
                ${locked
        ? html`<button type="button" class="primary" onClick=${onAccess}>Enter key</button>`
        : running
            ? html`<button type="button" class="danger" onClick=${onStop}>Stop</button>`
            : html`<button type="button" class="primary" disabled=${!text.trim() && !images.length}
                            onClick=${() => onSend()}>Send</button>`}
            </div>
        </div>
    `;
}
