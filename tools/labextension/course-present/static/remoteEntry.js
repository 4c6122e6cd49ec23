// JupyterLab loads this file where `make present` names its folder. It needs no build: it only runs
// commands that JupyterLab already has, once the opened notebook and its kernel are ready.
(() => {
  const IDLE_POLL = 100; // milliseconds

  const waitFor = async (condition) => {
    while (!condition()) await new Promise((done) => setTimeout(done, IDLE_POLL));
  };

  // no trace of hidden code, and no speaker notes on the wall
  const STYLE = `.jp-CodeCell .jp-InputPlaceholder, .course-notes { display: none !important; }
    .jp-Notebook .jp-Cell .jp-InputPrompt, .jp-Notebook .jp-OutputPrompt { flex-basis: 24px; min-width: 24px; }`;

  const hideNotes = (notebook) => {
    for (const cell of notebook.content.widgets) {
      if (cell.model.getMetadata('slideshow')?.slide_type === 'notes') cell.addClass('course-notes');
    }
  };

  const present = async (app) => {
    const notebook = () => app.shell.currentWidget;
    await waitFor(() => notebook()?.context?.isReady && notebook()?.sessionContext?.isReady);
    const kernel = () => notebook().sessionContext.session?.kernel;
    await waitFor(() => kernel()?.connectionStatus === 'connected' && kernel().status === 'idle');
    const run = (name, args) =>
      app.commands.execute(name, args).catch((error) => console.warn(name, error));
    document.head.appendChild(document.createElement('style')).textContent = STYLE;
    hideNotes(notebook());
    await run('notebook:hide-all-cell-code');
    if (app.shell.mode !== 'single-document') await run('application:toggle-mode');
    if (!app.shell.leftCollapsed) await run('application:toggle-left-area');
    for (const side of ['left', 'right']) await run('application:toggle-side-tabbar', { side });
    await run('application:toggle-header');
    await run('statusbar:toggle');
    await run('application:toggle-presentation-mode');
    await run('notebook:run-all-cells'); // so that every widget is live
    document.body.dataset.coursePresent = 'ready';
  };

  const plugin = {
    id: 'course-present:plugin',
    autoStart: true,
    activate: (app) => { app.restored.then(() => present(app)); },
  };

  (window._JUPYTERLAB = window._JUPYTERLAB || {})['course-present'] = {
    init: async () => {},
    get: async () => () => ({ __esModule: true, default: plugin }),
  };
})();
