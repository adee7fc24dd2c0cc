"""HTTP: routes, dialects, errors. Runs in the front-end process and knows the engine by its client."""
