// Browsers start no worker from a file on disk. Search runs in one, so on disk it gets a frame
// with the same interface: messages go in and out, and the rest of the page is not touched.
if (location.protocol === "file:") {
  class FrameWorker extends EventTarget {
    constructor(address) {
      super();
      this.queue = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => {
        this.dispatchEvent(new MessageEvent("message", { data }));
      };
      const load = (source) =>
        new Promise((done, fail) => {
          const script = inner.document.createElement("script");
          script.src = source;
          script.onload = done;
          script.onerror = fail;
          inner.document.body.append(script);
        });
      inner.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      load(String(address)).then(() => {
        const waiting = this.queue;
        this.queue = null;
        waiting.forEach((data) => this.deliver(data));
      });
    }
    deliver(data) {
      const inner = this.frame.contentWindow;
      inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }
    postMessage(data) {
      if (this.queue) this.queue.push(data);
      else this.deliver(data);
    }
    terminate() {
      this.frame.remove();
    }
  }
  window.Worker = FrameWorker;
  window.IFrameWorker = FrameWorker;
}
