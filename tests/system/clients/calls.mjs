// Calls of Node's clients, each as its users write it: node calls.mjs URL MODEL. Prints what calls.py prints.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { generateText, streamText } from "ai";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const apiKey = "none";
const messages = [{ role: "user", content: "Where is my cache?" }];
const prompt = messages[0].content;
const openai = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const claude = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const compatible = createOpenAICompatible({ name: "kvrouter", baseURL, apiKey });
const vercel = { maxOutputTokens: 16, maxRetries: 0, prompt };

async function joined(stream) {
  let text = "";
  for await (const piece of stream) text += piece;
  return text;
}

async function streamed(languageModel) {
  let failed = null; // the stream of texts only ends
  const { textStream } = streamText({ model: languageModel, ...vercel, onError: ({ error }) => { failed = error; } });
  const text = await joined(textStream);
  if (failed !== null) throw failed;
  return text;
}

const calls = [
  ["openai (npm)", "chat", async () =>
    (await openai.chat.completions.create({ model, messages, max_tokens: 8 })).choices[0].message.content],
  ["openai (npm)", "chat, streamed", async () => {
    let text = "";
    for await (const event of await openai.chat.completions.create({ model, messages, max_tokens: 8, stream: true }))
      text += event.choices[0]?.delta?.content ?? "";
    return text;
  }],
  ["openai (npm)", "responses", async () =>
    (await openai.responses.create({ model, input: prompt, max_output_tokens: 16 })).output_text],
  ["anthropic (npm)", "messages", async () =>
    (await claude.messages.create({ model, messages, max_tokens: 8 })).content[0].text],
  ["anthropic (npm)", "messages, streamed", async () =>
    (await claude.messages.stream({ model, messages, max_tokens: 8 }).finalMessage()).content[0].text],
  ["Vercel AI SDK", "openai(), its default: responses", async () =>
    (await generateText({ model: createOpenAI({ baseURL, apiKey })(model), ...vercel })).text],
  ["Vercel AI SDK", "openai(), streamed", async () =>
    streamed(createOpenAI({ baseURL, apiKey })(model))],
  ["Vercel AI SDK", "openai.chat()", async () =>
    (await generateText({ model: createOpenAI({ baseURL, apiKey }).chat(model), ...vercel })).text],
  ["Vercel AI SDK", "openai-compatible", async () =>
    (await generateText({ model: compatible(model), ...vercel })).text],
  ["Vercel AI SDK", "openai-compatible, streamed", async () =>
    streamed(compatible(model))],
  ["Vercel AI SDK", "anthropic()", async () =>
    (await generateText({ model: createAnthropic({ baseURL, apiKey })(model), ...vercel })).text],
];

for (const [client, what, call] of calls) {
  let failed = null;
  try {
    failed = (await call()) ? null : "an empty answer";
  } catch (error) {
    failed = `${error.name}: ${error.message}`;
  }
  console.log(JSON.stringify({ client, what, failed }));
}
