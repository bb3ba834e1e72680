package rig

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
)

// AddGuest adds a guest to a running daemon; its socket is ready when AddGuest returns.
func (d *Daemon) AddGuest(name, network string, queuePairs int) (socket string, err error) {
	socket = d.Socket + "-" + name
	body, err := json.Marshal(map[string]any{"name": name, "socket": socket, "network": network, "queue-pairs": queuePairs})
	if err != nil {
		return "", err
	}
	answer, err := d.http.Post("http://vhostd/v1/guests", "application/json", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusCreated {
		text, _ := io.ReadAll(answer.Body)
		return "", fmt.Errorf("POST /v1/guests %s: %s: %s", body, answer.Status, text)
	}
	return socket, nil
}

// GuestStats asks for one guest's counters.
func (d *Daemon) GuestStats(name string) (GuestStats, error) {
	all, err := d.allStats()
	for _, g := range all {
		if g.Name == name {
			return g, nil
		}
	}
	if err == nil {
		err = fmt.Errorf("no guest %s in /v1/stats", name)
	}
	return GuestStats{}, err
}

func (d *Daemon) allStats() ([]GuestStats, error) {
	var body struct {
		Guests []GuestStats `json:"guests"`
	}
	err := d.get("/v1/stats", &body)
	return body.Guests, err
}

// Switch is a switch's status as the control API gives it.
type Switch struct {
	Name     string            `json:"name"`
	Ports    int               `json:"ports"`
	Stations int               `json:"stations"`
	UplinkUp bool              `json:"uplink-up"`
	Drops    map[string]uint64 `json:"drops"`
}

// Switch asks for the status of the only switch.
func (d *Daemon) Switch() (Switch, error) {
	var body struct {
		Switches []Switch `json:"switches"`
	}
	if err := d.get("/v1/status", &body); err != nil {
		return Switch{}, err
	}
	if len(body.Switches) != 1 {
		return Switch{}, fmt.Errorf("%d switches in /v1/status, expected one", len(body.Switches))
	}
	return body.Switches[0], nil
}
