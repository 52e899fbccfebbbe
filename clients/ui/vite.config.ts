// Names without hashes: the files are committed, and the server tells browsers to ask whether they have changed.
import { defineConfig } from "vite";

const NOTICE = "/*! Holds Preact (c) Jason Miller and marked (c) MarkedJS, Christopher Jeffrey; both under the MIT licence. */";

export default defineConfig({
  esbuild: {
    jsx: "automatic", jsxImportSource: "preact", legalComments: "inline",
    supported: { "template-literal": false }, // else a line break in a text is one in the file, and its differences are hard to read
  },
  build: {
    outDir: "../../bough/server/ui",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    rollupOptions: {
      input: "src/main.tsx",
      output: { entryFileNames: "app.js", assetFileNames: "app[extname]", banner: NOTICE },
    },
  },
});
