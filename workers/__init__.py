"""One inference worker: engine, model, executor. Role-agnostic: the same worker prefills, decodes or does both."""
