"""HTTP: routes, dialects, errors. Runs in the front-end process; its engine is a client of one."""
